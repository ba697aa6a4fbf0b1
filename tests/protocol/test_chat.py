"""The payload of LLM_CHAT, followed without being kept."""

import pytest

from protocol.chat import ChatBody
from protocol.grammar import parse_request


def fed(lengths: tuple[int, ...], *pieces: bytes) -> ChatBody:
    body = ChatBody(lengths)
    for piece in pieces:
        body.feed(piece)
    return body


def test_a_payload_as_counted_is_not_separated() -> None:
    # spec L1
    assert not fed((1, 1, 1, 7), b"iop" + b"general").is_separated


@pytest.mark.parametrize("cut", range(11))
def test_three_uncounted_line_feeds_are_seen_however_the_payload_is_cut(
    cut: int,
) -> None:
    # spec L1
    payload = b"i\no\np\ngene"
    assert fed((1, 1, 1, 7), payload[:cut], payload[cut:]).is_separated


@pytest.mark.parametrize("cut", range(11))
def test_a_payload_is_followed_on_where_it_was_left(cut: int) -> None:
    # spec L1: by the next program of the same host
    payload = b"i\no\np\ngene"
    body = ChatBody.resume(*fed((1, 1, 1, 7), payload[:cut]).progress)
    body.feed(payload[cut:])
    assert body.is_separated
    assert body.progress == fed((1, 1, 1, 7), payload).progress


def test_the_seeds_second_example_is_separated() -> None:
    # spec L1
    assert fed((0, 0, 0, 7), b"\n\n\ngene").is_separated


def test_two_line_feeds_are_content() -> None:
    # spec L1
    assert not fed((1, 1, 1, 7), b"i\no\npXgene").is_separated


def test_a_short_preset_is_never_separated() -> None:
    # spec L1
    assert not fed((0, 0, 0, 2), b"\n\n").is_separated


# spec L1, L2: whether the request is answered or refused.
@pytest.mark.parametrize("flag", [b"false", b"maybe"])
def test_a_request_says_what_its_payload_is(flag: bytes) -> None:
    request = parse_request(b"LLM_CHAT %b 1 1 1 7" % flag, 2)
    body = ChatBody.of(request)
    assert body is not None
    body.feed(b"i\no\np\ngene")
    found = [body.wants_more]
    body.is_extended = True
    found.append(body.wants_more)
    assert found == [True, False]
    for line in (b"LLM_CHAT %b x 1 1 7" % flag, b"WRITE 1000 7", b"WRITE 1000 7 8"):
        assert ChatBody.of(parse_request(line, 2)) is None


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        (0, b"input files"),
        (2, b"output files"),
        (4, b"prompt"),
        (6, b"preset"),
        (8, b"preset"),
    ],
)
def test_the_first_part_that_is_not_whole_is_named(seen: int, name: bytes) -> None:
    # spec L2
    assert fed((2, 2, 2, 2), bytes(seen)).first_incomplete() == name


# spec L1: exact counts, concatenated; or, as the seed's second example, three LFs more.
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_whole_payload_is_split_into_its_four_parts(size: int) -> None:
    parts = (b"a\nb", b"", b"what is it?", b"general")
    for between in (b"", b"\n"):
        chat = ChatBody(tuple(map(len, parts)))
        data = between.join(parts)
        declared = data[: sum(map(len, parts))]
        for start in range(0, len(declared), size):
            chat.feed(declared[start : start + size])
        assert chat.is_separated is bool(between)
        assert chat.split(memoryview(data)) == parts
