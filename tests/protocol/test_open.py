"""OPEN in both dialects (spec O1 to O5)."""

import pytest

from protocol import MODES, messages
from protocol.messages import Open
from tests.protocol.lines import message, reply

# Version 2


@pytest.mark.parametrize("mode", [b"r", b"w", b"a", b"r+", b"w+", b"a+"])
def test_the_six_modes_are_taken(mode: bytes) -> None:
    assert mode in MODES
    assert message(b"OPEN f " + mode + b" true") == Open(b"f", mode, True)  # spec O3


@pytest.mark.parametrize(
    "name",
    [
        b"two words",
        b"two  blanks",
        b"a\ttab",
        b"r true",
        b"OPEN a r true",
        b'"quoted"',
        b"caf\xe9",
        b"nul\x00",
        b"..",
        b"/",
    ],
)
def test_names_keep_their_inner_bytes(name: bytes) -> None:
    assert message(b"OPEN " + name + b" r true") == Open(name, b"r", True)  # spec O1


def test_blanks_around_a_name_are_no_part_of_it() -> None:
    assert message(b"OPEN   a b \t r   false ") == Open(b"a b", b"r", False)  # spec O1


@pytest.mark.parametrize("line", [b"OPEN", b"OPEN a", b"OPEN a r", b"OPEN r  true"])
def test_fewer_than_three_parameters_are_refused(line: bytes) -> None:
    # spec O2
    assert reply(line) == b"ERROR OPEN requires filename, mode, and is_top_level\n"


@pytest.mark.parametrize("mode", [b"invalid", b"rw", b"R", b"r+b", b"+r", b"rb", b"x"])
def test_an_unknown_mode_is_named(mode: bytes) -> None:
    # spec O3
    assert reply(b"OPEN f " + mode + b" true") == b"ERROR invalid mode: " + mode + b"\n"


@pytest.mark.parametrize("flag", [b"maybe", b"True", b"TRUE", b"1", b"yes", b"user"])
def test_an_unknown_flag_is_named(flag: bytes) -> None:
    # spec O3
    assert reply(b"OPEN f r " + flag) == b"ERROR invalid is_top_level: " + flag + b"\n"


def test_the_count_comes_before_the_mode_and_the_mode_before_the_flag() -> None:
    # spec O4
    assert reply(b"OPEN bad maybe").startswith(b"ERROR OPEN requires ")
    assert reply(b"OPEN f bad maybe") == b"ERROR invalid mode: bad\n"
    assert reply(b"OPEN f r maybe") == b"ERROR invalid is_top_level: maybe\n"


# Version 1 (spec O5)


def test_two_parameters_leave_the_view_to_the_right_of_the_connection() -> None:
    assert message(b"OPEN test.txt w", 1) == Open(b"test.txt", b"w", None)  # spec O5


@pytest.mark.parametrize(("context", "flag"), [(b"user", True), (b"internal", False)])
def test_a_context_is_a_claim(context: bytes, flag: bool) -> None:
    # spec O5
    assert message(b"OPEN t.txt w " + context, 1) == Open(b"t.txt", b"w", flag)
    assert message(b"OPEN two words w " + context, 1) == Open(b"two words", b"w", flag)


def test_without_a_context_names_keep_their_blanks() -> None:
    assert message(b"OPEN my  own file r+", 1) == Open(b"my  own file", b"r+", None)


@pytest.mark.parametrize("context", [b"invalid", b"USER", b"true", b"r", b"w", b"a+"])
def test_what_follows_a_mode_must_be_a_context(context: bytes) -> None:
    # spec O5: also where it is a mode itself, so `my r w` can't be named without one.
    line = b"OPEN f r " + context
    assert reply(line, 1) == b"ERROR invalid context: " + context + b"\n"


def test_a_context_that_is_taken_leaves_the_mode_to_be_checked() -> None:
    assert reply(b"OPEN f bad internal", 1) == b"ERROR invalid mode: bad\n"  # spec O5


@pytest.mark.parametrize("line", [b"OPEN f bad", b"OPEN my file bad", b"OPEN r user"])
def test_else_the_last_token_is_the_mode(line: bytes) -> None:
    mode = line.rpartition(b" ")[2]
    assert reply(line, 1) == b"ERROR invalid mode: " + mode + b"\n"  # spec O5


@pytest.mark.parametrize("line", [b"OPEN", b"OPEN f", b"OPEN user"])
def test_a_name_and_a_mode_are_required(line: bytes) -> None:
    assert reply(line, 1) == b"ERROR OPEN requires filename and mode\n"  # spec O5


def test_only_open_differs_between_the_dialects() -> None:
    assert message(b"STAT true a", 1) == messages.Stat(True, b"a")  # spec O5
