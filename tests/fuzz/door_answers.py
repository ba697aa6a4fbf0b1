"""Answers of providers with changes: read in pieces, and written by every writer."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.fuzz.door_requests import BOUND, CHAT, MESSAGES, RESPONSES
from tests.fuzz.door_turns import turns
from tests.fuzz.door_words import BASE64, KEY, change, redactor
from tests.fuzz.fuzz_protocol import Plan


@cache
def answers() -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return (API, events) of some answers, as the stand-in gives them."""
    from demo.provider.answer import make_answer  # noqa: PLC0415
    from demo.provider.orders import read_orders  # noqa: PLC0415
    from demo.provider.question import Question  # noqa: PLC0415
    from demo.provider.sending import FORMS  # noqa: PLC0415
    from demo.provider.served import Served  # noqa: PLC0415

    found = []
    for form, body in (
        ("chat", CHAT),
        ("responses", RESPONSES),
        ("messages", MESSAGES),
    ):
        api: Any = form
        for text in (
            "!words=4 !think=2 !cached=1",
            "!leak",
            f"!text={KEY[:9]}",
            "!leak-tool",
            "!tool !think=1",
            "!usage=none !words=1",
        ):
            question = Question(api, body)
            orders = read_orders(text)
            if "calls" in text:
                orders["calls"] = "[]"
            answer = make_answer(question, Served("", {}, body), orders, KEY)
            events = FORMS[api].events(answer)
            found.append((form, tuple(event.value for event in events)))
    return tuple(found)


def check_answer(plan: Plan) -> None:
    """Read an answer in one piece and in many, and write it by every writer."""
    form, events = answers()[plan.byte() % len(answers())]
    changed: list[Any] = copy.deepcopy(list(events))
    for _ in range(plan.byte() % 6):
        _reorder(plan, changed)
    data = b"".join(_event_bytes(plan, event) for event in changed)
    if plan.byte() % 8 == 0:
        data = data[: (plan.byte() << 8 | plan.byte()) % (len(data) + 1)]
    sizes = [1 + plan.byte() for _ in range(plan.byte() % 24)]
    for make in writers(form):
        whole = taken(form, make, [data])
        by_parts = taken(form, make, cut(data, sizes))
        check_frames(form, whole)
        check_frames(form, by_parts)
        if by_parts != whole:  # of a piece with a fault in it nothing is passed on
            assert whole[:-1] == by_parts[: max(0, len(whole) - 1)]
            assert b"invalid response" in by_parts[-1]


def _reorder(plan: Plan, events: list[Any]) -> None:
    place = plan.byte() % (len(events) or 1)
    match plan.byte() % 6:
        case _ if not events:
            return
        case 0:
            del events[place]
        case 1:
            events.insert(place, copy.deepcopy(events[place]))
        case 2:
            events[place:] = events[place:][::-1]
        case 3:
            _, others = answers()[plan.byte() % len(answers())]
            events.insert(place, copy.deepcopy(others[plan.byte() % len(others)]))
        case _:
            if isinstance(events[place], dict):
                change(plan, events[place])


def _event_bytes(plan: Plan, event: Any) -> bytes:
    text = event if isinstance(event, str) else json.dumps(event)
    return b"data: %b\n\n" % text.encode()


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Cut data into pieces; the last size goes on to the end of what it was given."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in (*pieces, data) if piece]


def writers(form: str) -> list[Callable[[], Any]]:
    """Return makers of the writers for answers of an API."""
    from supervisor.llm import apis, messages_writer, responses_writer  # noqa: PLC0415
    from supervisor.llm.answer_writers import (  # noqa: PLC0415
        ChatWriter,
        PassedWriter,
        TranslatedWriter,
    )
    from supervisor.llm.translation import Translation  # noqa: PLC0415

    told = Translation({}, custom=frozenset({"patch"}))

    def numbered(prefix: str) -> str:
        return f"{prefix}_new"

    def messages() -> Any:
        maker = messages_writer.MessagesWriter(MESSAGES, told, "asked", numbered)
        return TranslatedWriter(redactor(), apis.MESSAGES, maker)

    def responses() -> Any:
        maker = responses_writer.ResponsesWriter(RESPONSES, told, "asked", 1, numbered)
        return TranslatedWriter(redactor(), apis.RESPONSES, maker)

    if form == "chat":
        chat = ChatWriter
        return [
            lambda: chat(redactor(), "asked", include_usage=True),
            messages,
            responses,
        ]
    return [lambda: PassedWriter(redactor(), "asked", apis.ASKABLE[form])]


def taken(form: str, make: Callable[[], Any], pieces: list[bytes]) -> list[bytes]:
    """Read an answer and write it, as the endpoint does; return what a child gets."""
    from supervisor.llm import gateway, ids  # noqa: PLC0415
    from supervisor.llm.answer_reader import AnswerError, ProviderError  # noqa: PLC0415
    from supervisor.llm.apis import ASKABLE  # noqa: PLC0415
    from supervisor.llm.errors import RefusedRequestError  # noqa: PLC0415

    take, reader, writer = turns().take, ASKABLE[form].reader(), make()
    frames: list[bytes] = []
    nobody: Any = None
    gate = gateway.Gateway(redactor(), nobody, 1.0, nobody, nobody)
    fixed: Any = SimpleNamespace(token_hex=lambda size: "0" * 2 * size)
    with patch.object(ids, "secrets", fixed):
        try:
            for piece in pieces:
                take(f"{form}: a piece has come", reader.receive, piece)
                while reader.has_lines:
                    for event in take(f"{form}: lines are read", reader.next_events):
                        frames += take(f"{form}: it is written", writer.feed, event)
            found = take(f"{form}: an answer is ended", reader.finish)
            usage = reader.usage() or reader.estimate(1, BOUND)
            assert usage.prompt >= 0
            assert usage.completion >= 0
            completion = take(f"{form}: it is redacted", gate.redact_completion, found)
            frames += take(f"{form}: its end is written", writer.finish, completion)
        except (AnswerError, ProviderError) as why:
            text = gate.describe_in_a_line(f"invalid response: {why}")
            assert KEY not in text
            if frames:  # else the status tells it
                frames += writer.fail(RefusedRequestError(502, text, "provider_error"))
    assert reader.held_bytes >= 0
    assert reader.output_pieces <= max(reader.output_bytes, 0)
    return frames


def check_frames(form: str, frames: list[bytes]) -> None:
    """Check that no key is in what a child gets, and that it ends once.

    Args:
        form: the API of the provider.
        frames: those that the child gets.
    """
    if not frames:
        return
    data = b"".join(frames)
    assert KEY.encode() not in data
    assert BASE64.encode()[3:-3] not in data
    events = [frame.split(b"data: ", 1)[1] for frame in frames]
    assert all(b"\n" not in event.removesuffix(b"\n\n") for event in events)
    values = [{} if e == b"[DONE]\n\n" else json.loads(e) for e in events]
    kinds = [one.get("type") for one in values]
    names = ("text", "thinking", "partial_json", "content", "arguments")
    for name in names:
        assert not any(KEY in text for text in _texts(values, name)), name
    ends = {"message_stop", "response.completed", "response.incomplete"}
    ends |= {"response.failed", "error"}
    places = [at for at, kind in enumerate(kinds) if str(kind) in ends]
    if frames[0].startswith(b"event: "):
        assert places == [len(frames) - 1], kinds
        check_order(values)


def check_order(events: list[Any]) -> None:
    """Check the order of the events of Messages or of Responses (spec MD3)."""
    if any(event["type"].startswith("response.") for event in events):
        _check_responses(events)
    else:
        _check_message(events)


def _check_responses(events: list[Any]) -> None:
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    begun: set[int] = set()
    ended: set[int] = set()
    for event in events:
        index = event.get("output_index")
        assert index not in ended
        if event["type"] == "response.output_item.added":
            assert index not in begun
            begun.add(index)
        elif event["type"] == "response.output_item.done":
            ended.add(index)
    if events[-1]["type"] != "response.failed":
        assert begun <= ended
        assert events[-1]["response"]["id"]


def _check_message(events: list[Any]) -> None:
    block = None
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert block is None
                block = event["index"]
            case "content_block_delta" | "content_block_stop" as kind:
                assert event["index"] == block
                block = None if kind == "content_block_stop" else block
            case "message_delta" | "message_stop":
                assert block is None
            case _:
                pass  # the beginning, or a new kind
    assert kinds.count("message_start") <= 1
    if kinds[-1] == "message_stop":
        assert kinds[0] == "message_start"
        assert all(e["message"]["id"] for e in events if e["type"] == "message_start")


def _texts(events: list[Any], name: str) -> Iterator[str]:
    """Yield the texts of a name that come in pieces."""
    texts: dict[tuple[Any, ...], str] = {}
    for event in events:
        if not str(event.get("type", "delta")).endswith("delta"):
            continue
        for place, delta in _deltas(event):
            if isinstance(delta, str) and name == "text":
                texts[place] = texts.get(place, "") + delta
            elif isinstance(delta, dict) and isinstance(delta.get(name), str):
                texts[place] = texts.get(place, "") + delta[name]
    yield from texts.values()


PLACES = ("index", "output_index", "content_index", "summary_index", "type")


def _deltas(event: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (place, piece) of what an event adds."""
    if not isinstance(event, dict):
        return
    yield tuple(str(event.get(key)) for key in PLACES), event.get("delta")
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict) or not isinstance(choice.get("delta"), dict):
            continue
        delta, at = choice["delta"], str(choice.get("index"))
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                yield (at, str(call.get("index"))), call.get("function")
        yield (at,), delta


def check_bytes(plan: Plan) -> None:
    """Read any bytes as an answer of each API, in one piece and in many."""
    from supervisor.llm.answer_reader import AnswerError, ProviderError  # noqa: PLC0415
    from supervisor.llm.apis import ASKABLE, EMBEDDINGS  # noqa: PLC0415

    sizes = [1 + plan.byte() % 16 for _ in range(plan.byte() % 16)]
    data = plan.raw(4096)
    for api in (*ASKABLE.values(), EMBEDDINGS):
        results = []
        for pieces in ([data], cut(data, sizes)):
            reader = api.reader()
            try:
                for piece in pieces:
                    turns().take(f"{api.name}: bytes are read", reader.feed, piece)
                results.append(json.dumps(reader.finish()).replace("0", ""))
            except (AnswerError, ProviderError) as why:
                results.append(str(why))
        assert len(set(map(_without_ids, results))) == 1, results


def _without_ids(text: str) -> str:
    """Return a text without the ids that were made for it."""
    return text if "_" not in text else text.split("_", 1)[0]
