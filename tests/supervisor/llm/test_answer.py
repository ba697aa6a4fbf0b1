"""A stream of events and the completion it amounts to (spec L7, I10): no I/O."""

import copy
import json
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.documents import MOST_DEPTH
from hostlib.redact import BLOT, Redactor
from supervisor.llm import answer_reader
from supervisor.llm.answer import Answer, usage_of
from supervisor.llm.answer_reader import MAX_VALUES, AnswerError
from supervisor.llm.answer_writers import ChatWriter
from supervisor.llm.deltas import ChoiceRedactor, EventRedactor
from supervisor.llm.quota import Usage

KEY = 'sk-ca/na+ry="7f3e91'
Delta = dict[str, Any]

TEXTS = st.lists(st.sampled_from(["a", "sk-", "sk-ca/na", KEY, " ", "ü"]), max_size=6)


def cut(data: st.DataObject, text: str) -> list[str]:
    """Cut a text into pieces anywhere."""
    pieces = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def event(delta: Delta, reason: str | None = None, **more: Any) -> Delta:
    """Return an event of one choice."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
    return {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}


def streamed(events: list[Delta]) -> bytes:
    """Return a stream's bytes."""
    lines = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in events]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def in_pieces(
    data: st.DataObject, content: str, calls: list[tuple[str, str]]
) -> list[Delta]:
    """Return events for a text and for calls of tools, in pieces, the calls mixed."""
    events = [event({"role": "assistant", "content": ""})]
    events += [event({"content": piece}) for piece in cut(data, content)]
    waiting = []
    for index, (name, arguments) in enumerate(calls):
        pieces = cut(data, arguments) or [""]
        head = {"index": index, "id": f"call_{index}", "type": "function"}
        function = {"name": name, "arguments": pieces[0]}
        parts = [{**head, "function": function}]
        parts += [
            {"index": index, "function": {"arguments": piece}} for piece in pieces[1:]
        ]
        waiting.append(parts)
    while any(waiting):
        parts = data.draw(st.sampled_from([parts for parts in waiting if parts]))
        events.append(event({"tool_calls": [parts.pop(0)]}))
    return [*events, event({}, "tool_calls" if calls else "stop")]


CALLS = st.lists(st.tuples(st.sampled_from(["ask", "risk"]), TEXTS), max_size=3)


# spec L7: whatever the pieces, also where the first of them is not empty.
@pytest.mark.slow
@given(data=st.data(), words=TEXTS, calls=CALLS)
def test_what_came_in_pieces_is_whole(
    data: st.DataObject, words: list[str], calls: list[tuple[str, list[str]]]
) -> None:
    wanted = [(name, "".join(texts)) for name, texts in calls]
    events = in_pieces(data, "".join(words), wanted)
    answer = Answer()
    told = [
        one for line in cut_bytes(data, streamed(events)) for one in answer.feed(line)
    ]
    assert told == events
    before = copy.deepcopy(told)
    for one in told:  # a writer that passes events on changes them
        ChoiceRedactor(Redactor([KEY])).feed(one["choices"][0])
    (choice,) = answer.finish()["choices"]
    assert choice["message"]["content"] == "".join(words)
    found = choice["message"].get("tool_calls") or []
    assert [
        (call["function"]["name"], call["function"]["arguments"]) for call in found
    ] == wanted
    assert before == events


def cut_bytes(data: st.DataObject, text: bytes) -> list[bytes]:
    """Cut bytes into two or three pieces."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=2)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


# I10, spec L13: each text of a stream is looked at as one, and nothing else is changed.
@pytest.mark.slow
@given(data=st.data(), words=TEXTS, calls=CALLS)
def test_a_key_is_found_across_events(
    data: st.DataObject, words: list[str], calls: list[tuple[str, list[str]]]
) -> None:
    wanted = [(name, "".join(texts)) for name, texts in calls]
    events = in_pieces(data, "".join(words), wanted)
    redactor = Redactor([KEY])
    choice = ChoiceRedactor(redactor)
    answer = Answer()
    for one in events:
        choice.feed(one["choices"][0])
        answer.feed(b"data: " + json.dumps(one).encode() + b"\n\n")
    assert not choice.rest()
    (found,) = answer.finish()["choices"]
    assert found["message"]["content"] == redactor.text("".join(words))
    assert [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in found["message"].get("tool_calls") or []
    ] == [
        (f"call_{index}", name, redactor.text(text))
        for index, (name, text) in enumerate(wanted)
    ]


# A stream that ends without its end gives what was held back all the same.
def test_what_is_held_back_comes_at_the_end() -> None:
    choice = ChoiceRedactor(Redactor([KEY]))
    one = event({"tool_calls": [{"index": 3, "function": {"arguments": "a sk-"}}]})
    choice.feed(one["choices"][0])
    (call,) = one["choices"][0]["delta"]["tool_calls"]
    assert call["function"]["arguments"] == "a "
    rest = {"tool_calls": [{"index": 3, "function": {"arguments": "sk-"}}]}
    assert choice.rest() == rest
    assert choice.rest() == {}


# spec L13, MD3: a text that ends where another begins has its end before that.
def test_what_is_held_back_comes_before_another_text() -> None:
    choice = ChoiceRedactor(Redactor([KEY]))
    call = {"index": 0, "function": {"arguments": "a sk-"}}
    for delta, ended in (
        ({"reasoning_content": "sk-"}, {}),
        ({"role": "assistant", "content": ""}, {}),
        ({"reasoning_content": "s"}, {}),
        ({"content": "files"}, {"reasoning_content": "s"}),
        ({"tool_calls": [call]}, {"content": "s"}),
        ({"content": "more s"}, {}),
        ({}, {}),
    ):
        one = event(delta)["choices"][0]
        assert choice.take_ended(one) == ended
        choice.feed(one)
    assert choice.take_ended({"delta": None}) == {}
    assert choice.take_ended({}) == {}
    call = {"index": 0, "function": {"arguments": "sk-"}}
    assert choice.rest() == {"content": "s", "tool_calls": [call]}


# spec L13, MD3: pieces that come behind the end of their text.
def test_a_key_goes_on_behind_the_end_of_its_arguments() -> None:
    redactor = EventRedactor(Redactor([KEY]))
    name = "response.function_call_arguments"
    events = [
        {"type": f"{name}.delta", "output_index": 0, "delta": KEY[:9]},
        {"type": f"{name}.done", "output_index": 0},
        {"type": f"{name}.delta", "output_index": 0, "delta": KEY[9:]},
    ]
    told = [found for one in events for found in redactor.feed(one)]
    assert "".join(one.get("delta", "") for one in told) == KEY[:9] + BLOT


# spec L13, MD3: text that comes behind the end of a choice, or behind another text.
@pytest.mark.parametrize("between", [({}, "stop"), ({"reasoning_content": "a"}, None)])
def test_a_key_goes_on_behind_what_ends_its_beginning(
    between: tuple[dict[str, object], str | None],
) -> None:
    delta, reason = between
    writer = ChatWriter(Redactor([KEY]), "m")
    frames = writer.feed(event({"content": KEY[:9]}))
    frames += writer.feed(event(delta, reason))
    frames += writer.feed(event({"content": KEY[9:]}))
    told = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    deltas = [one["choices"][0]["delta"] for one in told]
    text = "".join(one.get("content", "") for one in deltas)
    assert text == KEY[:9] + BLOT


# spec L7: those of an event are its own, whoever reads them when.
def test_log_probabilities_are_joined_and_events_left_alone() -> None:
    answer = Answer()
    told = []
    for token in ("a", "b", "c"):
        logprobs = {"content": [{"token": token}], "refusal": None}
        line = streamed([event({"content": token}, logprobs=logprobs)])
        told += answer.feed(line.removesuffix(b"data: [DONE]\n\n"))
    answer.feed(streamed([event({}, "stop")]))
    (choice,) = answer.finish()["choices"]
    joined = [one["token"] for one in choice["logprobs"]["content"]]
    assert joined == ["a", "b", "c"]
    assert [len(one["choices"][0]["logprobs"]["content"]) for one in told] == [1, 1, 1]


# spec L15: a stream that stops is no answer; a finished one may lack its last word.
def test_a_stream_that_stops_is_no_answer() -> None:
    last = b"data: [DONE]\n\n"
    begun = streamed([event({"content": "a"})]).removesuffix(last)
    finished = streamed([event({}, "stop")]).removesuffix(last)
    for text, is_whole in ((begun, False), (begun + finished, True)):
        answer = Answer()
        answer.feed(text)
        if is_whole:
            assert answer.finish()["choices"][0]["message"]["content"] == "a"
        else:
            with pytest.raises(AnswerError, match="ended before its end"):
                answer.finish()


# spec L15, L8: what is charged is a number of tokens.
@pytest.mark.parametrize("value", [-1, True, 1.5, "7", 1 << 53, 10**30, []])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "cached"])
def test_what_is_no_number_of_tokens_is_no_answer(name: str, value: object) -> None:
    usage: Delta = {"prompt_tokens": 1, "completion_tokens": 1}
    assert usage_of(usage) == Usage(1, 1)
    if name == "cached":
        usage["prompt_tokens_details"] = {"cached_tokens": value}
    else:
        usage[name] = value
    with pytest.raises(AnswerError, match="is no number of tokens"):
        usage_of(usage)


# spec L15: whatever a provider makes of its parts.
@pytest.mark.parametrize(
    "choice",
    [
        {"message": "x"},
        {"message": ["x"]},
        {"message": {}},
        {"message": "x", "delta": "x"},
        {"delta": {"tool_calls": {"index": 0}}},
        {"delta": {"tool_calls": [{"index": [0]}, {"index": [0]}, None, 1]}},
        {"delta": {"content": {"a": 1}}, "logprobs": {"content": 1}},
    ],
)
def test_what_is_no_message_is_no_fault(choice: Delta) -> None:
    for events in (
        [{"choices": [choice]}],
        [event({"content": "a"}), {"choices": [choice]}, event({}, "stop")],
    ):
        said = said_of(streamed(events))
        assert not said or said.startswith(("a choice without a message", "a message "))


def said_of(text: bytes) -> str:
    """Return what is wrong with an answer; nothing if it is one."""
    answer = Answer()
    try:
        answer.feed(text)
        answer.finish()
    except AnswerError as why:
        return str(why)
    return ""


# spec L7: some servers say all of it in one event.
def test_a_whole_message_in_an_event_is_taken_and_left_alone() -> None:
    answer = Answer()
    said = {"role": "assistant", "content": "all", "tool_calls": [{"id": "a"}]}
    told = answer.feed(
        streamed([{"choices": [{"message": said, "finish_reason": "stop"}]}])
    )
    (choice,) = answer.finish()["choices"]
    assert choice["message"] == said
    assert answer.output_bytes == len("all")
    choice["message"]["tool_calls"][0]["id"] = "b"
    assert told[0]["choices"][0]["message"] == said


# spec L7: who passes events on changes them.
def test_items_without_an_index_are_the_answers_own() -> None:
    answer = Answer()
    calls = [{"id": "a", "function": {"arguments": "x sk-"}}, {"id": "b"}]
    told = answer.feed(streamed([event({"tool_calls": calls})])[:-14])
    answer.feed(streamed([event({}, "tool_calls")]))
    ChoiceRedactor(Redactor([KEY])).feed(told[0]["choices"][0])
    (choice,) = answer.finish()["choices"]
    assert choice["message"]["tool_calls"] == calls


# spec L15, I9: joining and redacting walk through it, with a stack that has an end.
@pytest.mark.parametrize("is_plain", [False, True])
def test_what_is_nested_too_deep_is_no_answer(is_plain: bool) -> None:
    part = b"message" if is_plain else b"delta"
    for depth in (MOST_DEPTH // 2, MOST_DEPTH, 300, 700, 100_000):
        inner = b'{"a":' * depth + b"1" + b"}" * depth
        text = b'{"choices":[{"%b":{"x":%b},"finish_reason":"stop"}]}' % (part, inner)
        said = said_of(text if is_plain else b"data: " + text + b"\n\n")
        if depth < MOST_DEPTH:
            assert not said
        else:
            assert "within one another" in said or "not JSON" in said


# spec L14: one call takes a piece apart, and nobody else has a turn meanwhile.
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("value", [b"[]", b"{}", b"0", b'"[{"', b'{"index":1}'])
def test_what_has_very_many_values_is_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch, value: bytes, is_plain: bool
) -> None:
    def decoded(text: bytes) -> object:
        raise AssertionError(f"{len(text)} bytes are decoded")

    monkeypatch.setattr("msgspec.json.decode", decoded)
    values = b",".join([value] * MAX_VALUES)
    text = b'{"choices":[{"delta":{"tool_calls":[%b]}}]}' % values
    said = said_of(text if is_plain else b"data: " + text + b"\n\n")
    assert said == f"more than {MAX_VALUES} values in one piece"


# The longest output of a model: 128,000 tokens, each second of which is a comma.
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_long_answer_of_numbers_is_one(is_plain: bool) -> None:
    text = "[" + "1,\n" * 64_000 + "{}]"
    part = "message" if is_plain else "delta"
    choice = {"index": 0, part: {"content": text}, "finish_reason": "stop"}
    answer = Answer()
    data = streamed([{"choices": [choice]}])
    answer.feed(json.dumps({"choices": [choice]}).encode() if is_plain else data)
    assert answer.finish()["choices"][0]["message"]["content"] == text


def steps(text: bytes) -> int:
    """Count the lines of the host that an answer takes, piece by piece."""
    count = 0

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal count
        if not frame.f_globals["__name__"].startswith("supervisor.llm."):
            return None
        count += what == "line"
        return trace

    answer = Answer()
    sys.settrace(trace)
    try:
        for start in range(0, len(text), 1000):
            answer.feed(text[start : start + 1000])
        answer.finish()
    finally:
        sys.settrace(None)
    return count


# I9: counted, not timed.
def test_many_calls_of_tools_take_time_in_proportion() -> None:
    def calls(count: int) -> bytes:
        parts = [{"index": number, "id": "x"} for number in range(count)]
        each = [event({"tool_calls": [part]}) for part in parts]
        return streamed([event({"tool_calls": parts}), *each, event({}, "tool_calls")])

    assert steps(calls(400)) < 5 * steps(calls(100))


# I9: what is joined is not copied for each piece that comes, nor looked through again.
def test_what_has_come_is_not_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pending(bytearray):
        looked = 0

        def rfind(self, *args: Any) -> int:
            Pending.looked += len(self) - (args[1] if len(args) > 1 else 0)
            return super().rfind(*args)

    monkeypatch.setattr(answer_reader, "bytearray", Pending, raising=False)
    answer = Answer()
    part = event({"content": "a"}, logprobs={"content": [{"token": "a"}] * 3})
    text = streamed([part]).removesuffix(b"data: [DONE]\n\n")
    answer.feed(text)
    Pending.looked = 0
    for byte in text:
        answer.feed(bytes([byte]))
    assert 0 < Pending.looked <= 2 * len(text)

    def joined(count: int) -> bytes:
        return streamed([*[part] * count, event({}, "stop")])

    assert steps(joined(400)) < 5 * steps(joined(100))
