"""The link of a node actor.

Its request, its answer, its frames, however they are cut.
"""

import msgspec
import pytest

from supervisor.config.host import MAX_CHILDREN
from supervisor.fleet.link import (
    MAX_ANSWER_BYTES,
    MAX_FRAME_BYTES,
    ActorReader,
    FrameReader,
    LinkAnswer,
    LinkArgs,
    LinkError,
    check_link,
    encode_frame,
    refuse_link,
    request_line,
)
from supervisor.fleet.messages import (
    VERSION,
    Beat,
    ChildNews,
    ChildReport,
    Join,
    Message,
    Program,
    Renewed,
    Session,
    Start,
    decode_from_directory,
    decode_from_node,
    encode,
)

SESSION = Session("L1", 3)
BEATS = [Beat("a", SESSION, number) for number in range(1, 4)]
ANSWER = (
    b'{"v":1,"ok":true,"result":{"version":"fleet-2","ledger":"L1","capacity":9}}\n'
)


def frames(*messages: Message) -> bytes:
    """Return frames, one behind the other."""
    return b"".join(map(encode_frame, messages))


# spec FL2
def test_frames_are_read_as_they_were_sent() -> None:
    reader = FrameReader(decode_from_node)
    assert reader.feed(frames(*BEATS)) == BEATS


# spec FL2
@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
def test_frames_may_be_cut_anywhere(size: int) -> None:
    reader = FrameReader(decode_from_node)
    data = frames(*BEATS)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [one for piece in pieces for one in reader.feed(piece)] == BEATS


# spec FL2
def test_the_length_stands_first_in_four_bytes() -> None:
    data = frames(BEATS[0])
    assert int.from_bytes(data[:4], "big") == len(data) - 4


# spec FL2
def test_an_actor_speaks_for_the_directory_alone() -> None:
    reader = FrameReader(decode_from_directory)
    with pytest.raises(LinkError, match="cannot read a frame"):
        reader.feed(frames(BEATS[0]))


# spec FL2: a directory that has started anew is told all of them at once.
def test_a_join_has_room_for_all_children_that_a_host_may_have() -> None:
    running = ChildReport("c123456789", 12, "running", pid=4_194_304)
    join = Join("n" * 64, SESSION, 1, VERSION, (), 0, (running,) * MAX_CHILDREN, ())
    assert len(encode_frame(join)) < MAX_FRAME_BYTES


# spec FL2
@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_that_cannot_be_is_refused_at_once(size: int) -> None:
    reader = FrameReader(decode_from_node)
    with pytest.raises(LinkError, match=f"a frame of {size} bytes"):
        reader.feed(size.to_bytes(4, "big"))


# spec FL2
def test_nothing_is_read_after_a_fault() -> None:
    reader = FrameReader(decode_from_node)
    with pytest.raises(LinkError):
        reader.feed(b"\0\0\0\x01\xc1")
    with pytest.raises(LinkError, match="close the link"):
        reader.feed(frames(BEATS[0]))


# spec FL2
def test_the_longest_frame_is_taken() -> None:
    empty = len(frames(_start("")))
    room = MAX_FRAME_BYTES + 4 - empty
    # Longer strings have a longer header of their own.
    order = next(
        one
        for one in (_start("x" * (room - less)) for less in range(8))
        if len(encode(one)) <= MAX_FRAME_BYTES
    )
    assert len(encode(order)) == MAX_FRAME_BYTES
    assert FrameReader(decode_from_directory).feed(frames(order)) == [order]


# spec FL2
def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(LinkError, match="cannot send a Start"):
        encode_frame(_start("x" * MAX_FRAME_BYTES))


def _start(word: str) -> Start:
    return Start(1, SESSION, "c1", "web", 1, Program((word,)))


# spec FL2
def test_the_request_is_a_line_of_the_control_socket() -> None:
    line = request_line(LinkArgs("a", ("gpu",)), 1)
    assert line.endswith(b"\n")
    assert msgspec.json.decode(line) == {
        "v": 1,
        "do": "fleet-link",
        "args": {"node": "a", "labels": ["gpu"], "version": VERSION, "ray": None},
    }


# spec FL2
def test_an_actor_reads_the_answer_and_what_follows_in_the_same_bytes() -> None:
    reader = ActorReader()
    news = ChildNews("a", SESSION, ChildReport("c1", 1, "running", pid=7))
    assert reader.feed(ANSWER + frames(news)) == [news]
    assert reader.answer == LinkAnswer("fleet-2", "L1", 9)


# spec FL2
def test_an_answer_may_come_byte_by_byte_behind_heart_beats() -> None:
    reader = ActorReader()
    for byte in b"  " + ANSWER[:-1]:
        assert reader.feed(bytes([byte])) == []
        assert reader.answer is None
    assert reader.feed(b"\n") == []
    assert reader.feed(frames(*BEATS)) == BEATS
    assert reader.answer is not None


# spec FL2
def test_a_refusal_is_told_with_the_daemons_words() -> None:
    with pytest.raises(LinkError, match=r"^it has 64 orders$"):
        ActorReader().feed(b'{"v":1,"ok":false,"error":"it has 64 orders"}\n')


# spec FL2
@pytest.mark.parametrize("line", [b"hello\n", b'{"v":1}\n', b'{"ok":true}\n'])
def test_what_is_no_answer_is_refused(line: bytes) -> None:
    with pytest.raises(LinkError):
        ActorReader().feed(line)


# spec FL2
def test_an_answer_without_end_is_refused() -> None:
    with pytest.raises(LinkError, match="more than"):
        ActorReader().feed(b" " * (MAX_ANSWER_BYTES + 1))


# spec FL2
def test_messages_of_the_directory_reach_the_daemon() -> None:
    reader = FrameReader(decode_from_directory)
    assert reader.feed(frames(Renewed(2, SESSION, 1))) == [Renewed(2, SESSION, 1)]


# spec FL2
def test_a_first_link_is_let_in() -> None:
    check_link(LinkArgs("a"), linked=None)


# spec FL11
def test_a_link_of_another_version_is_refused_with_both_named() -> None:
    with pytest.raises(LinkError, match=r"'fleet-0'.*'fleet-5'"):
        check_link(LinkArgs("a", (), "fleet-0"), linked=None)


# spec FL2
@pytest.mark.parametrize(
    ("args", "linked", "why"),
    [
        (LinkArgs("a"), "a", "linked as node 'a' already"),
        (LinkArgs("a"), "b", "linked as node 'b' already"),
        (LinkArgs(""), None, "name is empty"),
    ],
)
def test_a_link_that_cannot_be_is_refused(
    args: LinkArgs, linked: str | None, why: str
) -> None:
    with pytest.raises(LinkError, match=why):
        check_link(args, linked=linked)


# spec FL11
@pytest.mark.parametrize(
    ("args", "why"),
    [
        (LinkArgs("a"), r"no \[fleet\]"),
        (LinkArgs("a", (), "fleet-0"), r"'fleet-0'.*'fleet-5'"),
    ],
)
def test_a_daemon_without_the_section_refuses_all(args: LinkArgs, why: str) -> None:
    with pytest.raises(LinkError, match=why):
        refuse_link(args)
