"""Forms of ToolExec: bytes in, bytes out, bounds in words."""

import re
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.toolexec import form


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (b"a+b%20c", b"a b c"),
        (b"%c3%A9", b"\xc3\xa9"),
        (b"100%", b"100%"),
        (b"%zz%4", b"%zz%4"),
        (b"%%41", b"%A"),
        (b"%00", b"\0"),
        (b"%2541", b"%41"),
    ],
)
def test_an_invalid_escape_stands_for_itself(text: bytes, data: bytes) -> None:
    assert form.decode(text) == data


ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
WORDS = [b"%", b"%4", b"=", b"+", b"\\x41", b"a", b"F", b"g", b"\n", b"\r", b"_"]


@given(st.lists(st.sampled_from(WORDS) | st.binary(max_size=3)).map(b"".join))
def test_any_text_is_decoded_as_it_says(text: bytes) -> None:
    plain = text.replace(b"+", b" ")
    expected = ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), plain)
    assert form.decode(text) == expected


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_arguments_arrive_byte_by_byte(args: list[bytes]) -> None:
    body = b"tool=x" + b"".join(
        b"&arg=" + quote_from_bytes(arg, safe="").encode() for arg in args
    )
    found = form.pairs(body)
    raw = [value for key, value in found if key == b"arg"]
    assert list(map(form.decode, raw)) == args
    if not any(b"\0" in arg for arg in args):
        assert form.call_of(found) == form.FormCall(b"x", b".", tuple(args))


def call(text: bytes, query: bytes = b"") -> form.FormCall:
    """Take a form apart."""
    return form.call_of(form.pairs(query, text))


# spec E17
def test_pairs_of_the_query_come_first_and_keys_have_no_case() -> None:
    found = call(b"TOOL=b&Arg=2&&ARG=3&other=x&arg", query=b"tool=a&arg=1")
    assert found == form.FormCall(b"b", b".", (b"1", b"2", b"3", b""))


def test_the_last_tool_and_the_last_cwd_win() -> None:
    assert call(b"tool=a&cwd=%2Fa&tool=b&cwd=.") == form.FormCall(b"b", b".", ())


def test_the_first_equals_sign_splits() -> None:
    assert call(b"tool=a&arg=x=y=").args == (b"x=y=",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "no tool"),
        (b"tool=", "no tool"),
        (b"tool=" + b"x" * 65, "tool longer than 64 bytes"),
        (b"tool=a&cwd=", "cwd is neither '.' nor an absolute path"),
        (b"tool=a&cwd=src", "cwd is neither '.' nor an absolute path"),
        (b"tool=a&cwd=/" + b"x" * 4096, "cwd longer than 4096 bytes"),
        (b"tool=a" + b"&arg=x" * 129, "more than 128 arguments"),
        (b"tool=a&arg=" + b"x" * 4097, "an argument longer than 4096 bytes"),
        (b"tool=a&arg=%00", "a NUL byte"),
        (b"tool=a%00", "a NUL byte"),
        (b"tool=a&cwd=/%00", "a NUL byte"),
    ],
)
def test_a_bad_form_says_why(text: bytes, why: str) -> None:
    with pytest.raises(form.FormError) as caught:
        call(text)
    assert str(caught.value) == why


# A notification has no directory: what is said of one is passed over, as any unknown key.
@pytest.mark.parametrize("cwd", [b"src", b"", b"/" + b"x" * 5000, b"/%00"])
def test_a_notification_has_no_directory(cwd: bytes) -> None:
    pairs = form.pairs(b"cmd=say&arg=1&cwd=" + cwd)
    assert form.notification_of(pairs) == (b"say", (b"1",))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"tool=say", "no cmd"),
        (b"cmd=" + b"x" * 65, "cmd longer than 64 bytes"),
        (b"cmd=a" + b"&arg=x" * 129, "more than 128 arguments"),
        (b"cmd=a&arg=" + b"x" * 4097, "an argument longer than 4096 bytes"),
        (b"cmd=a%00", "a NUL byte"),
    ],
)
def test_a_bad_notification_says_why(text: bytes, why: str) -> None:
    with pytest.raises(form.FormError) as caught:
        form.notification_of(form.pairs(text))
    assert str(caught.value) == why


def test_what_is_at_a_bound_passes() -> None:
    text = b"tool=" + b"t" * 64 + b"&cwd=/" + b"d" * 4095
    found = call(text + b"&arg=" + b"a" * 4096 + b"&arg=x" * 127)
    assert (len(found.tool), len(found.cwd), len(found.args)) == (64, 4096, 128)


def test_the_last_value_of_a_key() -> None:
    pairs = form.pairs(b"arg=1&ARG=%32")
    assert form.last(pairs, b"arg") == b"2"
    assert form.last(pairs, b"tool") is None


# The cost of a form is bounded before it is decoded.
def test_a_form_has_so_many_fields_and_no_more() -> None:
    most = form.MAX_FIELDS
    assert form.pairs(b"&" * (most - 1)) == []
    assert form.pairs(b"x&" * (most // 2 - 1), b"&" * (most // 2 - 1)) == []
    for parts in ((b"&" * most,), (b"a=&" * most,), (b"&" * 600, b"&" * 600)):
        with pytest.raises(form.FormError, match="more than 1024 fields"):
            form.pairs(*parts)


def test_only_what_is_asked_for_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    real = form.decode

    def counted(text: bytes) -> bytes:
        decoded.append(text)
        return real(text)

    monkeypatch.setattr(form, "decode", counted)
    long = b"%41" * 100_000
    for text in (
        b"tool=a&%61rg=%62&x=" + long,
        b"tool=a&arg=b&" + long,
        b"tool=" + long + b"&tool=a&arg=b",
    ):
        assert call(text) == form.FormCall(b"a", b".", (b"b",))
    for text in (b"tool=a&arg=" + long, b"tool=a" + b"&arg=%41" * 1000):
        with pytest.raises(form.FormError):
            call(text)
    assert sum(map(len, decoded)) < 5000
