"""Secrets are found however they are written, and in whatever pieces they come."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llm.redact import BLOT, Redactor, StreamRedactor

KEY = 'sk-ca/na+ry="7f3e91'

KEYS = st.text(
    st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40
)


# I10, spec L13: plain, URL-encoded, in JSON, and in base64 at any offset.
@given(key=KEYS, before=st.binary(max_size=9), after=st.binary(max_size=9))
def test_a_key_is_found_in_every_form(key: str, before: bytes, after: bytes) -> None:
    redactor = Redactor([key])
    whole = before + key.encode() + after
    for text in (
        f"a {key} b",
        quote(key, safe=""),
        json.dumps({"k": key}),
        base64.b64encode(whole).decode(),
        base64.urlsafe_b64encode(whole).decode(),
    ):
        assert BLOT in redactor.text(text)
        assert BLOT.encode() in redactor.data(text.encode())
        assert key not in redactor.text(text)


@given(text=st.text(), key=KEYS)
def test_what_holds_no_key_is_as_it_was(text: str, key: str) -> None:
    if not any(form in text for form in Redactor([key])._forms):
        assert Redactor([key]).text(text) == text


# I10: in pieces of any size.
@given(
    words=st.lists(st.sampled_from(["sk-", "a", KEY, KEY[:9], " "]), max_size=12),
    data=st.data(),
)
def test_a_key_is_found_across_pieces(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    stream = StreamRedactor(Redactor([KEY]))
    passed = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        passed.append(stream.feed(text[:size]))
        text = text[size:]
    found = "".join([*passed, stream.rest()])
    assert found == Redactor([KEY]).text("".join(words))


@pytest.mark.parametrize("end", ["s", "sk-ca/na+ry="])
def test_what_may_become_a_key_is_held_back(end: str) -> None:
    stream = StreamRedactor(Redactor([KEY]))
    assert stream.feed("hello " + end) == "hello "
    assert stream.feed("?") == end + "?"
