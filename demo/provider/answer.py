"""What the model says, before it has the form of an API."""

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from demo.provider.orders import Orders, calls_tools
from demo.provider.question import Question, Tool
from demo.provider.served import Served

ARGUMENT_PIECE_CHARS = 12
CREATED = 1_700_000_000
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool.

    Attributes:
        id: of the call.
        tool: the tool.
        pieces: the arguments as JSON, or the text of a custom tool, in pieces.
    """

    id: str
    tool: Tool
    pieces: list[str]

    @property
    def text(self) -> str:
        """The arguments in one piece."""
        return "".join(self.pieces)

    @property
    def input(self) -> Any:
        """The arguments as a value."""
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream.

    Attributes:
        value: its data; a text goes as it is.
        name: its SSE name, if the API has such.
        is_piece: it carries a token of the answer.
        is_thought: the token is one of reasoning.
    """

    value: dict[str, Any] | str
    name: str | None = None
    is_piece: bool = False
    is_thought: bool = False

    @property
    def type(self) -> str:
        """The name by which an order can mean it."""
        return self.name or (self.value if isinstance(self.value, str) else "chunk")

    def with_field(self, name: str, value: object) -> "Event":
        """Return the same event with a field added, where it has fields."""
        if isinstance(self.value, str):
            return self
        return replace(self, value={**self.value, name: value})


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer reports, as it was told: not always numbers.

    Attributes:
        input: tokens of the prompt.
        output: tokens of the answer.
        cached: of the input.
        written: of the input, to the cache.
        reasoning: of the output.
        tells_cache: an order named the cache.
    """

    input: Any
    output: Any
    cached: Any = 0
    written: int = 0
    reasoning: int = 0
    tells_cache: bool = False


@dataclass
class Answer:
    """An answer.

    Attributes:
        question: to be answered.
        served: the stand-in's note of it.
        orders: of the request.
        thoughts: words of reasoning.
        words: of the answer; may be without end.
        calls: of tools.
        is_short: the bound cut it.
        reported: tokens of the answer that were reported last; None for none.
    """

    question: Question
    served: Served
    orders: Orders
    thoughts: list[str] = field(default_factory=list)
    words: Iterable[str] = ()
    calls: list[Call] = field(default_factory=list)
    is_short: bool = False
    reported: int | None = None

    @property
    def number(self) -> int:
        """A number for ids."""
        return self.served.number

    @property
    def model(self) -> Any:
        """The model that was asked."""
        return self.question.body.get("model")

    @property
    def pieces(self) -> int:
        """Tokens of a whole answer, those of reasoning that nobody sees apart."""
        words = len(self.words) if isinstance(self.words, list) else 0
        return len(self.thoughts) + words + sum(len(one.pieces) for one in self.calls)

    def usage(self, sent: int | None = None) -> Usage | None:
        """Return what to report after so many pieces; None if nothing."""
        told = self.orders.get("usage")
        if told == "none":
            return None
        if told == "bad":
            return Usage("many", "more")
        served = self.served
        output = (self.pieces if sent is None else sent) + served.hidden
        if "output-tokens" in self.orders:
            output = int(self.orders["output-tokens"])
        self.reported = output
        return Usage(
            served.prompt_tokens,
            output,
            json.loads(self.orders.get("cached", "0")),
            served.written,
            served.hidden + len(self.thoughts),
            not {"cached", "written"}.isdisjoint(self.orders),
        )


def make_answer(
    question: Question, served: Served, orders: Orders, told: str
) -> Answer:
    """Return the answer to a question.

    Args:
        question: the question.
        served: the note of it; tokens of the prompt are entered.
        orders: of the request.
        told: its words on the key, where it gives that away.
    """
    dense = "dense" in orders
    asked = orders.get("prompt-tokens")
    served.prompt_tokens = int(asked) if asked else question.count(dense=dense)
    served.cached = json.loads(orders.get("cached") or "0") or 0
    served.written = int(orders.get("written", 0))
    left = question.bound
    answer = Answer(question, served, orders)
    served.hidden = _bounded(int(orders.get("hidden", 0)), left)
    if left is not None:
        left -= served.hidden
    thoughts = _thoughts(orders, told)
    answer.thoughts = thoughts[:left]
    if left is not None:
        left -= len(answer.thoughts)
    if "endless" in orders:
        answer.words = (f"word{at} " for at in itertools.count())
        return answer
    words = _words(orders, question.last_text, told)
    answer.words = words[:left]
    answer.is_short = left is not None and left < len(words)
    if calls_tools(orders):
        answer.calls = list(_calls(question, orders, told))
    return answer


def _bounded(count: int, bound: int | None) -> int:
    return count if bound is None else min(count, bound)


def _thoughts(orders: Orders, told: str) -> list[str]:
    if "leak-thought" in orders:
        return [*told]
    return [f"thought{number} " for number in range(int(orders.get("think", 0)))]


def _words(orders: Orders, text: str, told: str) -> list[str]:
    if calls_tools(orders):
        return []
    if "leak" in orders:
        return [*told]  # one character a piece, the hardest to find
    if "giant" in orders:
        return ["x" * (int(orders["giant"]) * MIB)]
    said = orders.get("text") or orders.get("say", "").replace("_", " ")
    if said:
        return re.findall(r"\S+\s*|\s+", said)
    if "words" in orders:
        return [f"word{number} " for number in range(int(orders["words"]))]
    count = len(re.findall(r"\S+", text))
    return re.findall(r"\S+\s*", f"The message has {count} words.")


def _calls(question: Question, orders: Orders, told: str) -> Iterable[Call]:
    wanted: list[Any]
    if "leak-tool" in orders:
        wanted = [("tell", {"key": told})]
    elif "calls" in orders:
        wanted = json.loads(orders["calls"])
    else:
        first = next(iter(question.tools.values()))
        wanted = [(first.name, "a" if first.is_custom else {"a": 1})]
    size = 1 if "leak-tool" in orders else ARGUMENT_PIECE_CHARS
    for number, (name, given) in enumerate(wanted, 1):
        text = given if isinstance(given, str) else json.dumps(given)
        tool = question.tools.get(name) or Tool(name)
        rounds, _ = question.rounds()
        ident = f"call_{number}" if not rounds else f"call_{rounds}_{number}"
        yield Call(ident, tool, wrapped(text, size))


def wrapped(text: str, size: int) -> list[str]:
    """Cut a text into pieces of a size; an empty one is one piece."""
    return [text[at : at + size] for at in range(0, len(text), size)] or [text]
