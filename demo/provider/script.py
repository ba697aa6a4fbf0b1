"""Scripted conversations: the answers of a model that has its mind made up.

An answer is a text, a list of `[tool, arguments]`, or a step such as `{"run": COMMAND}`
(`steps.py`), which becomes a call of whichever tool the request offers for it.
"""

import json
from dataclasses import dataclass
from typing import Any

from demo.provider.orders import Orders, read_orders
from demo.provider.question import Question
from demo.provider.steps import call_for


@dataclass
class Script:
    """How far a script has gone.

    Attributes:
        has_called: an answer of it called a tool, so the client is one with tools.
    """

    has_called: bool = False

    def take(self, script: list[Any], question: Question) -> Orders:
        """Take the next answer; none if the request does not offer its tools.

        A client with tools also asks without them, for a title: that takes no answer.
        """
        if not script or (self.has_called and not question.tools):
            return {}
        calls = _calls(script[0], question)
        if calls is None:
            return {}
        if isinstance(calls, str):
            del script[0]
            return {"text": calls}
        del script[0]
        self.has_called = True
        return {"calls": json.dumps(calls)}


def scripted(question: Question) -> Orders:
    """Return what the script in the user's last message says of this round.

    Raises:
        ValueError: it is no JSON.
    """
    rounds, text = question.rounds()
    script = json.loads(read_orders(text).get("script") or "[]")
    if rounds >= len(script):
        return {}
    calls = _calls(script[rounds], question)
    match calls:
        case None:
            return {}
        case str():
            return {"say": calls}
        case _:
            return {"calls": json.dumps(calls)}


def _calls(answer: Any, question: Question) -> list[Any] | str | None:
    """Return the calls of an answer, or its text; None if tools are missing."""
    match answer:
        case str():
            return answer
        case dict():
            call = call_for(answer, question.tools)
            return None if call is None else [call]
        case _:
            is_offered = {call[0] for call in answer} <= question.tools.keys()
            return answer if is_offered else None
