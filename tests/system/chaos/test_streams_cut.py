"""Answers of models are cut at random bytes.

Each is paid, and none ends as a whole one.
"""

import json
import random
import re
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest
import trio

from demo.provider.answer import ARGUMENT_PIECE_CHARS as PIECE_CHARS
from demo.provider.answer import wrapped
from demo.provider.question import BOUNDS
from demo.provider.served import Served
from tests.helpers.doors import Door, answered, open_door, open_door_stage, unchunked
from tests.helpers.rounds import LONG, ROUNDS, SEED
from tests.helpers.stage import Stage, eventually

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

CUTS = ROUNDS // 2 if LONG else 40
"""Answers that are cut in each of the two tests."""

NATIVE = ["chat", "responses", "messages"]
WAYS = pytest.mark.parametrize("apis", [NATIVE, ["chat"]], ids=["native", "chat"])

MOST_OUTPUT = 3000
"""Bound on the output where reasoning is asked for, which may cost all of it."""

ARGUMENTS = json.dumps({"command": "x" * 150})
RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: the connection is reset when it is closed (socket(7))."""

SCHEMA = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Form:
    """The differences between the doors.

    Attributes:
        path: of its requests.
        end: the last event of a whole answer.
        failure: that of an answer that failed.
        bound: the member that bounds the output.
        tool: a tool as its requests have it.
        reasoning: the members by which they ask for reasoning.
    """

    path: str
    end: str
    failure: str
    bound: str
    tool: dict[str, Any]
    reasoning: dict[str, Any]


FORMS = (
    Form(
        "/v1/chat/completions",
        "[DONE]",
        "error",
        "max_tokens",
        {"type": "function", "function": {"name": "run", "parameters": SCHEMA}},
        {"reasoning_effort": "low"},
    ),
    Form(
        "/v1/responses",
        "response.completed",
        "response.failed",
        "max_output_tokens",
        {"type": "function", "name": "run", "parameters": SCHEMA, "strict": None},
        {"reasoning": {"effort": "low"}},
    ),
    Form(
        "/v1/messages",
        "message_stop",
        "error",
        "max_tokens",
        {"name": "run", "input_schema": SCHEMA},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
)
CHAT, RESPONSES, MESSAGES = FORMS


@dataclass(frozen=True, slots=True)
class Cut:
    """A request, and where its answer is cut.

    Attributes:
        form: of the door.
        body: of the request.
        said: the text of the answer, or the arguments of its call.
        pieces: the text of each event that has one, reasoning first.
        leaves_after: bytes of the reply after which the child closes its connection;
            None if it stays to the end.
        resets: the host cannot send it anything then.
    """

    form: Form
    body: dict[str, Any]
    said: str
    pieces: tuple[str, ...]
    leaves_after: int | None
    resets: bool


def drawn(choice: random.Random) -> Cut:
    """Draw a request, and where its answer is cut."""
    form = choice.choice(FORMS)
    words = choice.choice((1, 3, 12, 40))
    thoughts = choice.choice((0, 0, 5))
    orders = [f"!think={thoughts}"] if thoughts else []
    body: dict[str, Any] = {"model": "m", "stream": choice.random() < 0.9}
    if choice.random() < 0.2:
        pieces = wrapped(ARGUMENTS, PIECE_CHARS)
        orders.append(f'!script=[[["run",{ARGUMENTS.replace(" ", "")}]]]')
        body["tools"] = [form.tool]
    else:
        # Four bytes each: a token by the count of events and by that of bytes.
        pieces = [f"{number:03d} " for number in range(words - 1)] + ["end."]
        orders.append(f"!say={'_'.join(map(str.strip, pieces))}")
    orders += choice.choice(([], [], ["!cached=3"], ["!usage=none"], ["!pings"]))
    told = [f"thought{number} " for number in range(thoughts)] + pieces
    place: int | None = choice.randrange(1, 600 + 230 * len(told))
    if choice.random() < 0.5:
        orders.append(f"!cut={place}")
        place = None
    elif choice.random() < 0.5:
        orders.append("!slow=0.001")  # else all of it has been sent by then
    reasons = choice.random() < 0.1
    if reasons or form is MESSAGES:
        body[form.bound] = MOST_OUTPUT
    if reasons:
        body |= form.reasoning
    asked = " ".join(orders)
    if form is RESPONSES:
        body["input"] = asked
    else:
        body["messages"] = [{"role": "user", "content": asked}]
    said, leaves = "".join(pieces), choice.random() < 0.5
    return Cut(form, body, said, tuple(told), place, leaves)


async def ask(door: Door, cut: Cut) -> tuple[int, bytes]:
    """Ask; return status and body, or 0 and what came to a child that has left."""
    data = door.request(cut.body)
    data = data.replace(CHAT.path.encode(), cut.form.path.encode(), 1)
    async with await door.connect() as stream:
        await stream.send_all(data)
        if cut.leaves_after is None:
            return await answered(stream)
        came = b""
        with trio.fail_after(30):
            while left := cut.leaves_after - len(came):
                piece = await stream.receive_some(left)
                came += piece
                if not piece or piece.endswith((b"0\r\n\r\n", b"}")):
                    break  # it was shorter
        if cut.resets:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return 0, came


# spec MD3, MD5, L11: no broken answer ends as a whole one, and each is paid.
@WAYS
async def test_answers_are_cut_at_random_bytes(
    tmp_path: Path, apis: list[str], tell: Callable[[str], None]
) -> None:
    seed = SEED or secrets.randbits(32)
    tell(f"CHAOS_SEED={seed}")
    choice = random.Random(seed)
    quota = {"max_tokens": 10**12}
    outcomes: Counter[str] = Counter()
    async with open_door_stage(
        tmp_path, api=apis, max_tokens=None, quota=quota
    ) as stage:
        door = await open_door(stage)
        with stage.journal.open() as journal:
            for number in range(CUTS):
                cut = drawn(choice)
                try:
                    outcomes[await cut_one(stage, door, cut, journal)] += 1
                except AssertionError as why:
                    why.add_note(f"answer {number}: {cut}")
                    raise
        root, rows = (
            stage.llm.models.accounts.root,
            stage.events("llm.called"),
        )
        assert root.calls.used == len(rows) == CUTS
        assert root.tokens.used == sum(row["cost"] for row in rows)
    if LONG:
        tell(f"{dict(outcomes)}")


async def cut_one(stage: Stage, door: Door, cut: Cut, journal: TextIO) -> str:
    """Have one answer cut, and look at what is left of it; return what became of it.

    Args:
        stage: where.
        door: of the child.
        cut: the request.
        journal: of the host, read up to here.
    """
    root, budget = stage.llm.models.accounts.root, stage.host.budget
    before = root.tokens.used
    stage.provider.served.clear()
    status, body = await ask(door, cut)
    await eventually(lambda: not root.calls.reservations and not stage.provider.at_once)
    await eventually(
        lambda: not budget.request_memory.used and not budget.payload_memory.used
    )
    assert not root.tokens.reserved
    (served,) = stage.provider.served
    rows = map(json.loads, journal)
    (row,) = (row for row in rows if row["event"] == "llm.called")
    assert root.tokens.used == before + row["cost"]
    output = served.tokens.output
    if not status and row["outcome"] != "ok":
        # The host cannot know of bytes that were on their way when it hung up.
        output = pieces_in(body)
    check_charge(cut, served, row, output)
    if not status:
        behind = served.tokens.output - row["completion_tokens"]
        return f"left, {row['outcome']}, {max(0, behind)} on the way"
    assert is_whole(cut, status, body) == (row["outcome"] == "ok"), (row, body)
    return str(row["outcome"])


def is_whole(cut: Cut, status: int, body: bytes) -> bool:
    """Check that a reply is a whole answer or an error, and tell which."""
    if status != 200:
        assert status == 502, body
        assert json.loads(body)["error"]["message"]
        return False
    if not cut.body["stream"]:
        assert cut.said.split()[-1].strip('{"}').encode() in body
        return True
    events = events_in(body)
    kinds = [kind_of(event) for event in events]
    ends = [kind for kind in kinds if kind in (cut.form.end, cut.form.failure)]
    assert ends == kinds[-1:], kinds
    said = "".join(text_in(event) for event in events)
    if cut.form is RESPONSES:
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))
    if ends == [cut.form.end]:
        assert said == cut.said
        return True
    assert cut.said.startswith(said)
    return False


def events_in(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; the end of Chat is one without members."""
    blocks = unchunked(body).split(b"\n\n")[:-1]
    texts = [block.partition(b"data: ")[2] for block in blocks]
    return [{} if text == b"[DONE]" else json.loads(text) for text in texts]


def pieces_in(body: bytes) -> int:
    """Return how many events with text there are in a reply that may be cut."""
    events = re.findall(rb"^data: (\{.*\})\n\n", body, re.MULTILINE)
    return sum(bool(text_in(json.loads(event))) for event in events)


def kind_of(event: dict[str, Any]) -> str:
    """Return what an event is called."""
    if not event:
        return "[DONE]"
    return str(event.get("type", "error" if "error" in event else "chunk"))


def text_in(event: dict[str, Any]) -> str:
    """Return what an event adds to the answer, reasoning apart."""
    if "choices" in event:
        delta = event["choices"][0]["delta"] if event["choices"] else {}
        call = (delta.get("tool_calls") or [{}])[0].get("function", {})
        return str((delta.get("content") or "") + call.get("arguments", ""))
    delta = event.get("delta", "")
    if isinstance(delta, dict):
        return str(delta.get("text") or delta.get("partial_json") or "")
    return "" if "reasoning" in kind_of(event) else str(delta)


def check_charge(cut: Cut, served: Served, row: dict[str, Any], output: int) -> None:
    """Check that a charge is the stand-in's count, or one event more.

    Three charges cannot be held to it. The host never saw bytes that were on their way
    when the child left. Of a plain answer that is cut no token can be read: it has no events. Where reasoning
    was asked for, all that was reserved is charged, for some of it may not be shown (MD5).

    Args:
        cut: the request.
        served: the stand-in's note of it.
        row: of the journal.
        output: events with text that came to the host, at least.
    """
    sent, counted = served.body, served.tokens
    if row["cost"] == counted.cost():
        return
    # Another charge is an estimate: there was no end, or the end told no usage.
    assert row["outcome"] != "ok" or served.reported is None, row
    own = {"model", "stream", "stream_options", *BOUNDS}
    told = {name: value for name, value in sent.items() if name not in own}
    prompt = -(-len(json.dumps(told, separators=(",", ":"))) // 4)
    if not sent.get("stream") and row["outcome"] != "ok":
        output = 0
    assert row["prompt_tokens"] >= max(prompt, counted.input), row
    assert row["completion_tokens"] >= output, row
    if output >= counted.output:
        assert row["cost"] >= counted.cost(), row
    if any(name in sent for form in FORMS for name in form.reasoning):
        assert row["cost"] > 4 * MOST_OUTPUT, row
        return
    # An event more: what came whole before the cut, the stand-in has not noted. The host counts
    # the bytes too, four a token: the pieces of arguments and of reasoning are longer.
    came = cut.pieces[: counted.output + 1]
    most = max(len(came), -(-len("".join(came)) // 4))
    assert row["completion_tokens"] <= most, row
    most_prompt = max(-(-len(json.dumps(cut.body)) // 4), counted.input)
    assert row["cost"] <= most_prompt + 4 * most, row
