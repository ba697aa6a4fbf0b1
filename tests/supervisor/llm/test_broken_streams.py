"""Faults of streams, found by fuzzing: each ends as an error or is repaired (MD3)."""

import json
from typing import Any

import pytest

from hostlib.redact import Redactor
from supervisor.llm.answer_reader import AnswerError
from supervisor.llm.answer_writers import ChatWriter, PassedWriter, TranslatedWriter
from supervisor.llm.apis import MESSAGES, RESPONSES, Api
from supervisor.llm.responses_writer import ResponsesWriter
from supervisor.llm.translation import Translation

KEY = "sk-any-answer-0123456789"
REDACTOR = Redactor([KEY])

START: dict[str, Any] = {"type": "message_start", "message": {"id": "m"}}
CREATED: dict[str, Any] = {"type": "response.created", "response": {"id": "r"}}


def fed(api: Api, *events: object) -> Any:
    """Return a reader of an API that has read events; a text goes as it is."""
    reader = api.reader()
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event)
        reader.feed(f"data: {text}\n\n".encode())
    return reader


# spec MD3: only Chat ends so.
@pytest.mark.parametrize(("api", "first"), [(MESSAGES, START), (RESPONSES, CREATED)])
def test_done_is_no_end_of_another_api(api: Api, first: dict[str, Any]) -> None:
    with pytest.raises(AnswerError, match="ended before its end"):
        fed(api, first, "[DONE]").finish()


# spec MD3: behind the end nothing can be told.
def test_bad_usage_ends_an_answer_before_its_end_is_passed_on() -> None:
    usage = {"input_tokens": "many", "output_tokens": 1}
    with pytest.raises(AnswerError, match="usage"):
        fed(MESSAGES, START, {"type": "message_delta", "delta": {}, "usage": usage})
    end = {"type": "response.completed", "response": {"id": "r", "usage": usage}}
    with pytest.raises(AnswerError, match="usage"):
        fed(RESPONSES, CREATED, end)


# spec MD3: else the end of the item is told twice, and its call is made twice.
@pytest.mark.parametrize("kind", ["added", "done"])
def test_an_item_without_a_place_ends_the_answer(kind: str) -> None:
    event = {"type": f"response.output_item.{kind}", "item": {"type": "message"}}
    with pytest.raises(AnswerError, match="of none"):
        fed(RESPONSES, CREATED, event)


# spec L13: the name of an event is looked at like its data.
def test_no_key_is_in_the_name_of_an_event() -> None:
    writer = PassedWriter(REDACTOR, "m", MESSAGES)
    (frame,) = writer.feed({"type": KEY})
    assert KEY.encode() not in frame


# spec MD3: a name that is several lines would be several events.
@pytest.mark.parametrize("name", ["a\ndata: {}\n\n", "a\r", None, 1])
@pytest.mark.parametrize("api", [MESSAGES, RESPONSES])
def test_an_event_without_a_plain_name_ends_the_answer(api: Api, name: object) -> None:
    first = START if api is MESSAGES else CREATED
    with pytest.raises(AnswerError, match="no name"):
        fed(api, first, {"type": name})


# spec MD3: also where the provider's first event has text.
def test_a_translated_answer_is_numbered_from_its_first_event_on() -> None:
    maker = ResponsesWriter({}, Translation({}), "m", 0)
    writer = TranslatedWriter(REDACTOR, RESPONSES, maker)
    frames = writer.feed({"choices": [{"index": 0, "delta": {"content": "a"}}]})
    events = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"


# spec MD3: an event may have something else at the place of a text whose end is held back.
@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"parts": [{"text": "sk-"}]}, {"parts": ["a"]}),
        ({"content": "sk-"}, {"content": ["a"]}),
        ({"content": "sk-"}, {"content": 1}),
    ],
)
def test_a_held_end_takes_the_place_of_something_else(
    first: dict[str, Any], last: dict[str, Any]
) -> None:
    writer = ChatWriter(REDACTOR, "m")
    writer.feed({"choices": [{"index": 0, "delta": first}]})
    end = {"index": 0, "delta": last, "finish_reason": "stop"}
    assert b"sk-" in b"".join(writer.feed({"choices": [end]}))


# spec MD5: what a model has written is charged in whichever form it comes.
def test_calls_and_reasoning_of_a_plain_answer_are_counted() -> None:
    block = {"type": "tool_use", "id": "t", "name": "run", "input": {"a": "x" * 200}}
    message = {"type": "message", "id": "m", "content": [block]}
    item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "x" * 200}],
    }
    response = {"object": "response", "id": "r", "output": [item]}
    answers: tuple[tuple[Api, dict[str, Any]], ...]
    answers = ((MESSAGES, message), (RESPONSES, response))
    for api, answer in answers:
        reader = api.reader()
        reader.feed(json.dumps(answer).encode())
        reader.finish()
        assert reader.estimate(1, None).completion >= 50


# spec L13: an event that tells the state, as some providers do on and on, ends no text.
@pytest.mark.parametrize("state", ["queued", "in_progress"])
def test_no_key_passes_around_a_state_of_the_response(state: str) -> None:
    writer = PassedWriter(REDACTOR, "m", RESPONSES)
    kind = "response.output_text"
    frames: list[bytes] = []
    for event in (
        {"type": f"{kind}.delta", "output_index": 0, "delta": KEY[:9]},
        {"type": f"response.{state}", "response": {"id": "r"}},
        {"type": f"{kind}.delta", "output_index": 0, "delta": KEY[9:]},
        {"type": f"{kind}.done", "output_index": 0, "text": KEY},
    ):
        frames += writer.feed(event)
    events = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]
    assert "".join(event.get("delta", "") for event in events) == REDACTOR.text(KEY)
