"""The other commands: order of checks, and what is drained before a refusal."""

import pytest

from protocol import limits, messages
from protocol.messages import Refusal
from tests.protocol.lines import message as parsed_as
from tests.protocol.lines import reply
from tests.protocol.streams import parse

REQUIRES_CHAT = (
    b"ERROR LLM_CHAT requires is_top_level, input_files_count, output_files_count,"
    b" prompt_length, and preset_length\n"
)


def refusal(line: bytes) -> Refusal:
    """Return the refusal of a line, before its payload."""
    (parsed,) = parse([line + b"\n"])
    assert isinstance(parsed.message, Refusal)
    return parsed.message


def drained(line: bytes) -> int:
    """Return how many payload bytes are drained for a refused line."""
    return refusal(line).body


# READ


@pytest.mark.parametrize(
    "line", [b"READ", b"READ 1000", b"READ 1 2 3", b"READ 1 2 x y"]
)
def test_read_requires_two_parameters(line: bytes) -> None:
    assert reply(line) == b"ERROR READ requires fileno and size\n"  # spec R2


@pytest.mark.parametrize("flag", [b"true", b"false"])
def test_read_tolerates_a_flag(flag: bytes) -> None:
    assert parsed_as(b"READ 1000 5 " + flag) == messages.Read(b"1000", 5)  # spec R2


@pytest.mark.parametrize("tail", [b"maybe", b"TRUE", b"true true", b"true x"])
def test_read_tolerates_nothing_else(tail: bytes) -> None:
    # spec R2
    assert reply(b"READ 1000 5 " + tail) == b"ERROR READ requires fileno and size\n"


def test_the_fileno_of_a_read_comes_before_its_size() -> None:
    assert reply(b"READ abc xyz") == b"ERROR invalid fileno: abc\n"  # spec R2


@pytest.mark.parametrize("word", [b"READ", b"SEEK", b"TRUNCATE"])
def test_a_bad_size_waits_until_the_fileno_was_looked_up(word: bytes) -> None:
    found = refusal(word + b" 0777 xyz")
    assert found.token == b"0777"  # spec R2: an unknown fileno is the first error
    assert found.reply.endswith(b": xyz\n")


def test_a_bad_fileno_needs_no_look_up() -> None:
    assert refusal(b"READ abc xyz").token is None  # spec R2
    assert refusal(b"CLOSE abc").token is None


@pytest.mark.parametrize("word", [b"CLOSE", b"READ", b"WRITE"])
def test_a_fileno_is_kept_as_it_was_spelt(word: bytes) -> None:
    found = parsed_as(word + (b" 0007" if word == b"CLOSE" else b" 0007 0"))
    assert isinstance(found, messages.FileRequest)
    assert (found.fileno, found.token) == (7, b"0007")  # spec F5


# WRITE


def test_a_write_has_its_size_as_payload() -> None:
    (parsed,) = parse([b"WRITE 1000 11\nWRITE 1 1\nx"])
    assert parsed == (messages.Write(b"1000", 11), b"WRITE 1 1\nx")  # spec W1


@pytest.mark.parametrize("line", [b"WRITE", b"WRITE 5", b"WRITE x"])
def test_too_few_parameters_of_a_write_drain_nothing(line: bytes) -> None:
    assert reply(line) == b"ERROR WRITE requires fileno and size\n"  # spec W6
    assert drained(line) == 0


def test_a_surplus_token_of_a_write_drains_its_payload() -> None:
    found = refusal(b"WRITE 1000 5 true")
    assert found == Refusal(b"ERROR WRITE requires fileno and size\n", 5)  # spec W4


@pytest.mark.parametrize("line", [b"WRITE 1000 x5", b"WRITE abc -1", b"WRITE 1 9e9"])
def test_a_size_that_does_not_parse_is_named_and_drains_nothing(line: bytes) -> None:
    size = line.rpartition(b" ")[2]
    assert refusal(line) == Refusal(b"ERROR invalid size: " + size + b"\n")  # spec W4


def test_a_surplus_token_behind_a_bad_size_drains_nothing() -> None:
    found = refusal(b"WRITE 1000 x 5")
    assert found == Refusal(b"ERROR WRITE requires fileno and size\n")  # spec W6


@pytest.mark.parametrize("token", [b"abc", b"-1", b"9" * 19, b"1" * 5000])
def test_a_bad_fileno_of_a_write_is_left_to_the_host(token: bytes) -> None:
    # spec W6: drain, cap, fileno; the cap is the host's.
    (parsed,) = parse([b"WRITE " + token + b" 5\nhello"])
    message, body = parsed
    assert isinstance(message, messages.Write)
    assert (message.fileno, message.token) == (messages.NO_FILENO, token)
    assert (message.size, body) == (5, b"hello")


def test_a_write_may_announce_more_than_any_cap() -> None:
    found = message_of(b"WRITE 1000 " + b"9" * 18)
    assert found.body == 10**18 - 1  # spec W3, W4: it is drained, so it is counted


def message_of(line: bytes) -> messages.Request:
    """Return what a line means, with its payload still to come."""
    (parsed,) = parse([line + b"\n"])
    return parsed.message


# Extensions (spec X1)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"PING", messages.Ping()),
        (b"CAPS", messages.Caps()),
        (b"ATTACH", messages.Attach()),
        (b"LLM_QUOTA", messages.Quota()),
        (b"LLM_CONFIG", messages.Config()),
        (b"SYNC 1000", messages.Sync(b"1000")),
        (b"CLOSE 1000", messages.Close(b"1000")),
        (b"SEEK 1000 0", messages.Seek(b"1000", 0)),
        (b"TRUNCATE 1000 8", messages.Truncate(b"1000", 8)),
        (b"STAT true a b", messages.Stat(True, b"a b")),
        (b"LIST false .", messages.ListDir(False, b".")),
        (b"MKDIR\ttrue\ta  b ", messages.MakeDir(True, b"a  b")),
        (b"REMOVE false  true", messages.Remove(False, b"true")),
    ],
)
def test_an_extension_means_what_the_table_says(
    line: bytes, expected: messages.Request
) -> None:
    assert parsed_as(line) == expected  # spec X1


@pytest.mark.parametrize(
    ("word", "requires"),
    [
        (b"SYNC", b"fileno"),
        (b"SEEK", b"fileno and offset"),
        (b"TRUNCATE", b"fileno and size"),
        (b"STAT", b"is_top_level and filename"),
        (b"LIST", b"is_top_level and filename"),
        (b"MKDIR", b"is_top_level and filename"),
        (b"REMOVE", b"is_top_level and filename"),
        (b"RENAME", b"is_top_level, old_length, and new_length"),
        (b"NARROW", b"size"),
        (b"FD_CALL", b"size"),
        (b"FD_PUT", b"size"),
    ],
)
def test_an_extension_says_what_it_requires(word: bytes, requires: bytes) -> None:
    text = b"ERROR " + word + b" requires " + requires + b"\n"
    assert refusal(word) == Refusal(text)  # spec X1


def test_a_name_is_required_behind_the_flag() -> None:
    assert reply(b"STAT true") == b"ERROR STAT requires is_top_level and filename\n"
    assert reply(b"STAT maybe a") == b"ERROR invalid is_top_level: maybe\n"  # spec X1


def test_the_names_of_a_rename_are_its_payload() -> None:
    (parsed,) = parse([b"RENAME true 3 4\na bc\n d"])
    assert parsed == (messages.Rename(True, 3, 4), b"a bc\n d")  # spec X1


@pytest.mark.parametrize(
    ("line", "text", "body"),
    [
        (b"RENAME maybe 3 4", b"invalid is_top_level: maybe", 7),
        (b"RENAME true x 4", b"invalid old_length: x", 0),
        (b"RENAME true 3 -4", b"invalid new_length: -4", 0),
        (b"RENAME maybe 3 x", b"invalid is_top_level: maybe", 0),
        (
            b"RENAME true 3",
            b"RENAME requires is_top_level, old_length, and new_length",
            0,
        ),
        (
            b"RENAME true 3 4 x",
            b"RENAME requires is_top_level, old_length, and new_length",
            7,
        ),
        (b"NARROW x", b"invalid size: x", 0),
        (b"NARROW 5 x", b"NARROW requires size", 5),
        (b"FD_CALL 9 x", b"FD_CALL requires size", 9),
        (b"FD_PUT 9 x y", b"FD_PUT requires size", 9),
        (b"FD_PUT x 9 y", b"FD_PUT requires size", 0),
        (b"FD_PUT -9 x", b"invalid size: -9", 0),
    ],
)
def test_a_refused_payload_is_drained_if_its_length_is_known(
    line: bytes, text: bytes, body: int
) -> None:
    assert refusal(line) == Refusal(b"ERROR " + text + b"\n", body)  # spec W4


def test_a_piece_of_content_may_name_what_it_is_appended_to() -> None:
    assert message_of(b"FD_PUT 5") == messages.FdPut(5)
    assert message_of(b"FD_PUT 5 t-1") == messages.FdPut(5, b"t-1")


# LLM_CHAT


def test_the_four_parts_of_a_chat_are_its_payload() -> None:
    body = b"in.txtout.txtSay helloX"
    (parsed,) = parse([b"LLM_CHAT true 6 7 9 1\n" + body])
    assert parsed == (messages.Chat(True, 6, 7, 9, 1), body)  # spec L1


@pytest.mark.parametrize("line", [b"LLM_CHAT", b"LLM_CHAT true 1 2 3", b"LLM_CHAT x"])
def test_too_few_parameters_of_a_chat_drain_nothing(line: bytes) -> None:
    assert refusal(line) == Refusal(REQUIRES_CHAT)  # spec L2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"LLM_CHAT true 1 2 3 4 5", Refusal(REQUIRES_CHAT, 10, None, (1, 2, 3, 4))),
        (b"LLM_CHAT maybe 1 2 3 4 5", Refusal(REQUIRES_CHAT, 10, None, (1, 2, 3, 4))),
        (b"LLM_CHAT true 1 2 x 4 5", Refusal(REQUIRES_CHAT)),
    ],
)
def test_surplus_tokens_of_a_chat_drain_what_parses(
    line: bytes, found: Refusal
) -> None:
    assert refusal(line) == found  # spec L2


def test_a_bad_flag_of_a_chat_drains_good_counts() -> None:
    text = b"ERROR invalid is_top_level: invalid\n"
    assert refusal(b"LLM_CHAT invalid 1 2 3 4") == Refusal(text, 10, None, (1, 2, 3, 4))
    assert refusal(b"LLM_CHAT invalid 1 2 x 4") == Refusal(text)  # spec L2: token order


@pytest.mark.parametrize(
    "name",
    ["input_files_count", "output_files_count", "prompt_length", "preset_length"],
)
def test_a_bad_count_of_a_chat_is_named_and_drains_nothing(name: str) -> None:
    counts = {
        "input_files_count": "1",
        "output_files_count": "2",
        "prompt_length": "3",
        "preset_length": "4",
    }
    line = "LLM_CHAT true " + " ".join((counts | {name: "1x"}).values())
    assert refusal(line.encode()) == Refusal(f"ERROR invalid {name}: 1x\n".encode())


def test_the_first_of_two_bad_counts_is_named() -> None:
    # spec L2: in token order
    assert reply(b"LLM_CHAT true 1 b 3 d") == b"ERROR invalid output_files_count: b\n"


def test_a_chat_may_be_as_long_as_the_limit() -> None:
    line = b"LLM_CHAT true 8388605 1 1 1"
    assert message_of(line) == messages.Chat(True, 8_388_605, 1, 1, 1)  # spec L2


def test_a_longer_chat_is_drained_and_refused_by_its_sum() -> None:
    text = b"ERROR invalid prompt_length: 8388609 exceeds limit 8388608\n"
    parts = (8_388_605, 1, 1, 2)
    found = Refusal(text, limits.MAX_CHAT_BYTES + 1, None, parts)
    assert refusal(b"LLM_CHAT true 8388605 1 1 2") == found  # spec L2


def test_a_bad_flag_comes_before_the_sum_of_a_chat() -> None:
    found = refusal(b"LLM_CHAT x 9000000 0 0 0")
    assert found.reply == b"ERROR invalid is_top_level: x\n"  # spec L2
    assert found.body == 9_000_000
