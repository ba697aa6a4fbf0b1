"""Secrets are found however they are written, and in whatever pieces they come."""

import base64
import json
from types import SimpleNamespace
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.redact import BLOT, Redactor, SoughtText, StreamRedactor
from supervisor.llm.answer_reader import AnswerError
from supervisor.llm.gateway import Gateway

KEY = 'sk-ca/na+ry="7f3e91'

KEYS = st.text(
    st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40
).filter(lambda key: key not in BLOT)

# Characters that escapes are made of.
AWKWARD = st.text(st.sampled_from('\\%"/u025cC'), min_size=8, max_size=20)


# I10, spec L13: plain, URL-encoded, in JSON, and in base64 at any offset.
@pytest.mark.slow
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


def writings(char: str) -> list[str]:
    """Return how a character is written: as it is, in a URL, in JSON within JSON."""
    codes = f"{ord(char):02x}", f"{ord(char):04x}"
    found = [char]
    for two, four in (codes, (codes[0].upper(), codes[1].upper())):
        found += [f"%{two}", *("\\" * count + f"u{four}" for count in (1, 2))]
    more = {"/": ("\\/", "\\\\/", "\\\\\\/"), '"': ('\\"', '\\\\\\"'), "\\": ("\\\\",)}
    return [*found, *more.get(char, ())]


@st.composite
def mixtures(draw: st.DrawFn, text: str) -> str:
    """Draw a text of which each character is written in some way of its own."""
    return "".join(draw(st.sampled_from(writings(char))) for char in text)


def streamed(redactor: Redactor, text: str, data: st.DataObject) -> str:
    """Return what comes of a text in pieces."""
    stream = StreamRedactor(redactor)
    passed = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        passed.append(stream.feed(text[:size]))
        text = text[size:]
    return "".join([*passed, stream.rest()])


# I10, spec L13: as libraries write it, each in its own way.
@pytest.mark.parametrize(
    "written",
    [
        r"sk-canary+0123456789abcdef/aa=b",
        r"sk-canary%2b0123456789abcdef%2faa%3db",
        r"sk-canary%2B0123456789abcdef/aa%3Db",  # quote() leaves the slash
        r"sk-canary+0123456789abcdef\/aa=b",  # PHP
        r"sk-canary\u002b0123456789abcdef/aa\u003db",  # JSON for a page
        r"sk-canary\u002B0123456789abcdef\/aa\u003Db",
        r"sk-canary\\u002b0123456789abcdef\\/aa\\u003db",  # a tool's arguments
    ],
)
def test_a_key_is_found_as_libraries_write_it(written: str) -> None:
    redactor = Redactor(["sk-canary+0123456789abcdef/aa=b"])
    assert redactor.text(f'you sent "{written}".') == f'you sent "{BLOT}".'
    for size in range(1, 9):
        stream = StreamRedactor(redactor)
        pieces = (written[at : at + size] for at in range(0, len(written), size))
        assert "".join([*map(stream.feed, pieces), stream.rest()]) == BLOT


# A password in an address may be any text: by its bytes in a URL, its units in JSON.
def test_a_secret_that_is_not_ascii_is_found() -> None:
    word = "pass w\N{LATIN SMALL LETTER O WITH DIAERESIS}rd \N{KEY}"
    in_json = json.dumps(word)
    redactor = Redactor([word])
    for written in (word, quote(word).lower(), quote_plus(word), in_json):
        for text in (written, json.dumps(written)):
            found = redactor.text(text)
            assert found.replace("\\", "").strip('"') == BLOT, text


# I10: each character in a way of its own, whole and in pieces of any size.
@pytest.mark.slow
@given(
    key=KEYS | AWKWARD,
    around=st.sampled_from(["", " ", "é"]),
    data=st.data(),
)
def test_a_key_is_found_in_any_mixture_of_writings(
    key: str, around: str, data: st.DataObject
) -> None:
    redactor = Redactor([key])
    written = data.draw(mixtures(key))
    text = f"{around}{written}{around}"
    for found in (redactor.text(text), streamed(redactor, text, data)):
        assert written not in found
        # Of a key that holds a beginning of escapes, the end of one may be left.
        if not {"%", "\\"} & set(key):
            assert found == f"{around}{BLOT}{around}"
    inside = redactor.data(json.dumps({"k": text}, ensure_ascii=False).encode())
    assert json.loads(inside)["k"].startswith(f"{around}{BLOT}")


# I10: base64 that a URL or JSON holds, likewise.
@pytest.mark.slow
@given(key=KEYS, offset=st.integers(0, 2), data=st.data())
def test_a_key_is_found_in_any_mixture_of_writings_of_base64(
    key: str, offset: int, data: st.DataObject
) -> None:
    encode = data.draw(st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))
    piece = encode(b"x" * offset + key.encode() + b"xx").decode()
    inner = piece[4 : len(piece) // 4 * 4 - 8]  # whatever stands around the key
    written = data.draw(mixtures(inner))
    before, after = piece[:4], piece[len(piece) // 4 * 4 - 8 :]
    text = f"{before}{written}{after}"
    for found in (
        Redactor([key]).text(text),
        streamed(Redactor([key]), text, data),
    ):
        assert written not in found
        assert BLOT in found


# A text with all but one character of a key holds no key, in any writing.
@pytest.mark.slow
@given(
    key=st.text(st.sampled_from("abc+/=-0"), min_size=8, max_size=20),
    data=st.data(),
)
def test_what_holds_no_key_is_as_it_was(key: str, data: st.DataObject) -> None:
    text = data.draw(mixtures(key[:-1])) + data.draw(st.text())
    if key not in text:
        redactor = Redactor([f"{key}~"])
        assert redactor.text(text) == text
        assert redactor.data(text.encode(errors="replace")).decode() == (
            text.encode(errors="replace").decode()
        )
        assert streamed(redactor, text, data) == text


# A backslash that was left before the blot would end the JSON that it stands in.
@pytest.mark.parametrize("first", ['"', "\\", "/", "s"])
def test_json_without_a_key_is_json(first: str) -> None:
    key = f"{first}k-abcdef"
    for count in range(20):
        for written in (first, f"\\u{ord(first):04x}"):
            content = "\\" * count + written + key[1:]
            clean = Redactor([key]).data(json.dumps({"content": content}).encode())
            found = json.loads(clean)["content"]
            assert found.removesuffix(BLOT).strip("\\") == ""


# I10: in pieces of any size.
@pytest.mark.slow
@given(
    words=st.lists(st.sampled_from(["sk-", "a", KEY, KEY[:9], " "]), max_size=12),
    data=st.data(),
)
def test_a_key_is_found_across_pieces(words: list[str], data: st.DataObject) -> None:
    found = streamed(Redactor([KEY]), "".join(words), data)
    assert found == Redactor([KEY]).text("".join(words))


@pytest.mark.parametrize(
    "end", ["s", "sk-ca/na+ry=", "\\", "sk-ca\\\\", "sk-ca%2", "sk-ca\\u002", "%73k"]
)
def test_what_may_become_a_key_is_held_back(end: str) -> None:
    stream = StreamRedactor(Redactor([KEY]))
    assert stream.feed("hello " + end) == "hello "
    assert stream.feed("?") == end + "?"


# I10, spec L13: a text may go on behind its end, or behind another text.
@given(
    words=st.lists(st.sampled_from(["sk-", "a", KEY, KEY[:9], KEY[9:]]), max_size=8),
    data=st.data(),
)
def test_a_key_is_found_across_an_end(words: list[str], data: st.DataObject) -> None:
    stream, told = StreamRedactor(Redactor([KEY])), ""
    for word in words:
        told += stream.feed(word)
        if data.draw(st.booleans()):
            told += stream.rest()
    told += stream.rest()
    assert KEY not in told
    assert not stream.is_holding
    assert stream.has_found == (KEY in "".join(words))
    if not stream.has_found:
        assert told == "".join(words)


def test_the_rest_of_a_key_whose_beginning_was_told_is_blotted_out() -> None:
    stream = StreamRedactor(Redactor([KEY]))
    assert stream.feed(f"a {KEY[:9]}") == "a "
    assert stream.rest() == KEY[:9]
    assert stream.feed(KEY[9:12]) == ""
    assert stream.rest() == KEY[9:12]
    assert stream.feed(f"{KEY[12:]} b") == f"{BLOT} b"


# spec L11: a row of backslashes before a key loses one if it is left odd, in one piece and
# in many: the last of them would escape what follows.
@pytest.mark.slow
@given(
    count=st.integers(0, 60),
    sizes=st.lists(st.integers(1, 30), max_size=12),
    data=st.data(),
)
def test_a_row_of_backslashes_is_cut_alike_in_one_piece_and_in_many(
    count: int, sizes: list[int], data: st.DataObject
) -> None:
    written = data.draw(st.sampled_from((KEY, json.dumps(KEY)[1:-1], _as_units(KEY))))
    text = "a" + "\\" * count + written + "b"
    whole = Redactor([KEY]).text(text)
    row = whole.removeprefix("a").removesuffix(f"{BLOT}b")
    assert row == "\\" * len(row)
    assert written[0] != "\\" or len(row) % 2 == 0
    stream = StreamRedactor(Redactor([KEY]))
    passed = []
    for size in sizes:
        passed.append(stream.feed(text[:size]))
        text = text[size:]
    passed += [stream.feed(text), stream.rest()]
    assert "".join(passed) == whole


def _as_units(text: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in text)


# spec L11: what ends in a backslash takes the quote behind it along, in JSON within JSON.
def test_an_answer_that_is_nothing_without_the_key_is_none() -> None:
    key = "pass+word\\"
    gateway = SimpleNamespace(_redactor=Redactor([key]))

    def redacted(content: str) -> bytes:
        found = {"choices": [{"message": {"content": content}}]}
        return Gateway.redact_completion(gateway, found).data  # type: ignore[arg-type]

    assert b"pass" not in redacted(f"it is {key} there")
    with pytest.raises(AnswerError, match="nothing without"):
        redacted(json.dumps({"y": key}))


# The beginning that the keys of one provider have in common is nothing secret: whoever has
# it said again and again, in any writing, has nobody follow it each time.
def test_a_beginning_that_is_said_often_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redactor = Redactor(["sk-ant-api03-" + "aZ09+/bq" * 18])
    followed = 0
    follow = SoughtText.follow

    def counted(wanted: SoughtText, text: str, at: int) -> tuple[int | None, bool]:
        nonlocal followed
        followed += 1
        return follow(wanted, text, at)

    monkeypatch.setattr(SoughtText, "follow", counted)
    text = "".join(f"\\u{ord(char):04x}" for char in "sk-ant-api03-") * 1000
    assert redactor.text(text) == text
    assert followed == 0
