"""Requests are read strictly, and passed on byte for byte if unchanged (MD2)."""

import json
import math
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llm import json_request
from supervisor.llm.json_request import (
    BadJsonError,
    JsonRequest,
    is_short,
    read_request,
)

MOST_VALUES = 50_000


def read(data: bytes) -> JsonRequest:
    """Read a request with the usual bound."""
    return read_request(data, MOST_VALUES)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 53), 1 << 53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
OBJECTS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8), VALUES, max_size=8
)


# spec MD2: what is not changed is sent on byte for byte.
@pytest.mark.slow
@given(OBJECTS, st.booleans(), st.sampled_from([None, 1, "\t"]), st.data())
def test_only_what_is_named_is_changed(
    value: dict[str, Any], ascii_only: bool, indent: Any, data: st.DataObject
) -> None:
    sent = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    sent = b" \n" + sent + b"\r\t "
    request = read(sent)
    assert request.value == value == request.whole_value()
    assert request.with_changes({}) == sent
    names = st.sampled_from([*value, "new", 'n"\u00e9w'])
    changes = data.draw(st.dictionaries(names, VALUES, max_size=4))
    without = data.draw(st.sets(names, max_size=3)) - set(changes)
    texts = {name: json.dumps(one).encode() for name, one in changes.items()}
    changed = request.with_changes(texts, without)
    expected = {k: v for k, v in value.items() if k not in without} | changes
    assert list(json.loads(changed).items()) == list(expected.items())
    for name in set(value) - set(changes) - without:
        assert request.text_of(name) in changed


# spec MD2, MD8: a long request is read without its long texts, and all its places hold.
@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(["a", "\u00e9", "\U0001f9ff", '"', "\\", "\n", "x" * 70]),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_places_hold_behind_long_texts(parts: list[str], ascii_only: bool) -> None:
    long = "".join(parts) * 700
    short = "k" + "".join(parts)[:60]
    value = {"a": long, short: [long, 1, {"b": short}], "model": "m", "z": long}
    pad = {"pad": "y" * json_request.INLINE_BYTES}
    sent = json.dumps({**value, **pad}, ensure_ascii=ascii_only).encode()
    request = read(sent)
    assert request.has_long_texts
    assert request.value["a"] == ""
    assert request.value["model"] == "m"
    assert request.whole_value() == {**value, **pad}
    assert json.loads(request.text_of("z")) == long
    changed = request.with_changes({"model": b'"n"'}, {"a"})
    del value["a"]
    assert json.loads(changed) == {**value, "model": "n", **pad}


DEEP = b'{"a":' * 101 + b"1" + b"}" * 101
LONG = b'"' + b"x" * json_request.INLINE_BYTES + b'"'


# spec MD2: what two readers could read differently is refused.
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b'{"a":1', "no JSON"),
        (b'{"a":1}{', "behind the object"),
        (b'{"a" 1}', ": is missing"),
        (b'{"a":1 "b":2}', ", is missing"),
        (b'{"a":1,}', "is missing"),
        (b"{a:1}", "is missing"),
        (b'{"a":tru}', "no JSON"),
        (b'{"a":"\n"}', "no JSON"),
        (b'{"a":"\xff"}', "no JSON"),
        (b'{"a":"\xed\xa0\x80"}', "no JSON"),
        (b'\xef\xbb\xbf{"a":1}', "no JSON object"),
        (b'{"a":1,"a":1}', "'a' stands twice"),
        (b'{"a":1,"\\u0061":1}', "'a' stands twice"),
        (b'{"x":[{"model":1,"b":{},"model":1}]}', "'model' stands twice"),
        (b'{"a":NaN}', "NaN is no JSON"),
        (b'{"a":[-Infinity]}', "-Infinity is no JSON"),
        (b'{"a":1e999}', "1e999 overflows"),
        (b'{"a":-1e999}', "-1e999 overflows"),
        (b'{"a":18446744073709551616}', "overflows"),
        (b'{"a":' + b"9" * 15_000_000 + b"}", "beside its long texts"),
        (b'{"a":0.' + b"9" * 5_000_000 + b"}", "beside its long"),
        (b'{"a":0.' + b"9" * 500 + b"}", "overflows"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":"\\udc00\\ud800"}', "surrogate"),
        (b'{"\\ud800":' + LONG + b"}", "surrogate"),
        (DEEP, "more than 100 lists and objects"),
        (b'{"a":' + b"[" * 90_000, "more than 100 lists and objects"),
        (b'{"a":' + b"[" * 200_000, "more than 50000 values"),
        (b'{"a":' + LONG + b',"b":1,"b":2}', "'b' stands twice"),
        (b'{"a":' + LONG + b',"b":' + LONG[:-1] + b'\\x"}', "not well formed"),
        (b'{"a":' + LONG + b',"b":' + LONG[:-1] + b'\x01"}', "not well formed"),
        (b'{"a":' + LONG + b',"b":' + LONG[:-1] + b'\xff"}', "no JSON"),
        (b'{"a":' + LONG + b" " * (3 << 20) + b"}", "beside its long texts"),
    ],
)
def test_what_readers_may_read_differently_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadJsonError) as why:
        read(data)
    assert said in str(why.value), str(why.value)[:200]


def test_numbers_of_64_bits_and_pairs_are_taken() -> None:
    value = {"a": [0, -(1 << 63), (1 << 64) - 1, 1.5, -1e-300], "b": "\U0001f9ff"}
    assert read(json.dumps(value).encode()).value == value
    assert math.isfinite(value["a"][-1])  # type: ignore[arg-type] # a list


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_are_refused(data: bytes) -> None:
    try:
        found = read(b"{" + data + b"}")
    except BadJsonError:
        return
    assert json.loads(b"{" + data + b"}") == found.value


# A request cut at every byte is refused.
def test_a_request_that_is_cut_is_refused() -> None:
    whole = json.dumps({"a": ["\u00e9", {"b": -1.5e3}], "c": None, "d": True}).encode()
    for end in range(len(whole)):
        with pytest.raises(BadJsonError):
            read(whole[:end])


# spec MD2: in a long request, too, a text that is no UTF-8 is refused.
@pytest.mark.parametrize(
    "wrong", [b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf4\x90\x80\x80"]
)
def test_a_long_text_that_is_no_utf8_is_refused(wrong: bytes) -> None:
    long = b"x" * json_request.INLINE_BYTES
    with pytest.raises(BadJsonError):
        read(b'{"a":"%b%b"}' % (long, wrong))


# spec MD2: only values are left out of what is decoded.
def test_long_keys_of_a_long_request_are_kept() -> None:
    first, second = "k" * 300, "l" * 300
    long = "x" * json_request.INLINE_BYTES
    found = read(json.dumps({first: 1, second: {first: 2}, "a": long}).encode())
    assert list(found.members) == [first, second, "a"]
    assert found.value[second] == {first: 2}
    with pytest.raises(BadJsonError, match="stands twice"):
        read(b'{"%b":1,"%b":2,"a":"%b"}' % (*[first.encode()] * 2, long.encode()))


def count(value: object) -> int:
    """Return how many values and keys there are in one, itself included."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 1 + (sum(map(count, value)) if isinstance(value, list) else 0)


CHAINS = st.integers(0, 90).map(
    lambda depth: json.loads("[" * depth + "]" * depth or "1")
)


# spec MD8: what is read in the Trio thread has few values, however they stand.
@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=2), VALUES | st.lists(CHAINS, max_size=9)))
def test_what_is_read_at_once_has_few_values(value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    with patch.object(json_request, "INLINE_VALUES", 20):
        assert not is_short(data) or count(value) <= 2 * json_request.INLINE_VALUES


# spec MD8: 49,000 lists without a comma between most of them took 18 ms.
def test_lists_within_lists_are_counted() -> None:
    chain = b"[" * 90 + b"]" * 90
    assert not is_short(b'{"a":[%b]}' % b",".join([chain] * 540))
    assert is_short(b'{"a":[%b]}' % b",".join([b"[[]]"] * 200))


def items(item: bytes, count: int) -> bytes:
    """Return a request with so many items."""
    return b'{"input":[%b]}' % b",".join([item] * count)


MESSAGE = b'{"role":"user","content":"a"}'
SLOW = {
    "objects": items(b"{}", 1000),
    "numbers": items(b"1234567890123456789", 1500),
    "fractions": items(b"0." + b"1" * 20, 1300),
    "long fractions": items(b"0." + b"1" * 390, 200),
    "messages": items(MESSAGE, 240),
    "members": b"{%b}" % b",".join(b'"%d":1' % n for n in range(300)),
    "escapes": items(b'"%b"' % (rb"\u0041" * 14_000), 1),
}
"""Requests that took a millisecond and more to read, check and translate, or nearly."""


# spec MD8: counted before anything is parsed, whatever takes the time.
@pytest.mark.parametrize("row", SLOW)
def test_what_takes_a_millisecond_is_no_short_request(row: str) -> None:
    assert not is_short(SLOW[row])


# A conversation of some turns takes no detour by a thread.
def test_a_usual_request_is_short() -> None:
    assert is_short(items(MESSAGE, 60))
    assert is_short(items(b'"%b"' % (b"a" * 60_000), 1))
