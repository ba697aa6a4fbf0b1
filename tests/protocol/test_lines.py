"""The beginning and end of a request line, and its answer (spec section 2)."""

import pytest

from protocol import HostConnection, limits, messages
from tests.protocol.lines import message, reply
from tests.protocol.streams import TOO_LONG, Parsed, parse

PING = messages.Ping()


# F1, what separates


def test_one_cr_before_lf_is_stripped() -> None:
    assert message(b"PING\r") == PING  # spec F1


def test_a_second_cr_belongs_to_the_last_token() -> None:
    # spec F1: one CR is stripped; CR is no blank.
    assert reply(b"PING\r\r") == b"ERROR unknown command: PING?\n"
    assert reply(b"READ 1000 5\r\r") == b"ERROR invalid size: 5?\n"


def test_a_cr_inside_a_line_is_a_byte_like_any_other() -> None:
    assert message(b"OPEN a\rb r true") == messages.Open(b"a\rb", b"r", True)  # spec F1
    assert reply(b"CLOSE 1\r2") == b"ERROR invalid fileno: 1?2\n"


def test_blanks_before_a_trailing_cr_are_ignored() -> None:
    assert message(b"READ 1000 5 \t\r") == messages.Read(b"1000", 5)  # spec F1


def test_a_cr_before_trailing_blanks_is_not_trailing() -> None:
    assert reply(b"READ 1000 5\r ") == b"ERROR invalid size: 5?\n"  # spec F1


@pytest.mark.parametrize("blank", [b" ", b"\t", b"  ", b"\t \t"])
def test_tokens_are_separated_by_runs_of_blanks(blank: bytes) -> None:
    line = blank + blank.join([b"READ", b"1000", b"5"]) + blank
    assert message(line) == messages.Read(b"1000", 5)  # spec F1


@pytest.mark.parametrize("blank", [b"\t", b" \t", b"\t ", b"   "])
def test_any_blank_may_follow_the_word_of_a_command_with_a_name(blank: bytes) -> None:
    # spec F1
    assert message(b"OPEN" + blank + b"a r true") == messages.Open(b"a", b"r", True)
    assert message(b"STAT" + blank + b"true a") == messages.Stat(True, b"a")


@pytest.mark.parametrize("byte", [b"\x0b", b"\x0c", b"\x00", b"\x1c", b"\x85", b"\xa0"])
def test_only_space_and_tab_are_blanks(byte: bytes) -> None:
    assert reply(b"READ 1000" + byte + b"5") == b"ERROR READ requires fileno and size\n"
    assert isinstance(message(b"PING" + byte), messages.Refusal)  # spec F1


@pytest.mark.parametrize("word", [b"ping", b"Ping", b"open", b"Read"])
def test_commands_are_case_sensitive(word: bytes) -> None:
    assert reply(word) == b"ERROR unknown command: " + word + b"\n"  # spec F1


# F2, what is no request


@pytest.mark.parametrize("line", [b"", b" ", b"\t", b" \t ", b"\r", b" \r"])
def test_a_blank_line_is_an_empty_request(line: bytes) -> None:
    assert reply(line) == b"ERROR empty request\n"  # spec F2


@pytest.mark.parametrize("tail", [b"", b" 1000 5", b"\t1000", b" true a b"])
def test_an_unknown_word_is_echoed_without_what_follows(tail: bytes) -> None:
    assert reply(b"INVALID" + tail) == b"ERROR unknown command: INVALID\n"  # spec F2


# F3, one message a line


def test_every_line_gives_exactly_one_message() -> None:
    lines = b"PING\n\nNOPE\nOPEN\nREAD a b\n\x00\xff\nPING\n"
    parsed = parse([lines])
    assert len(parsed) == lines.count(b"\n")  # spec F3
    assert parsed[-1] == Parsed(PING, b"")


def test_no_error_ends_the_session() -> None:
    connection = HostConnection()
    for _ in range(1000):
        first = connection.receive_data(b"NOPE\n")
        assert isinstance(first, messages.Refusal)
    assert connection.receive_data(b"PING\n") == PING  # spec F3


# F4, lines that are too long


def test_the_longest_line_is_taken() -> None:
    name = b"x" * (limits.MAX_LINE_BYTES - len(b"STAT true "))
    assert message(b"STAT true " + name) == messages.Stat(True, name)  # spec F4


@pytest.mark.parametrize("surplus", [1, 2, 100, 70_000])
def test_a_longer_line_is_refused_once_and_the_session_goes_on(surplus: int) -> None:
    line = b"x" * (limits.MAX_LINE_BYTES + surplus) + b"\n"
    assert parse([line + b"PING\n"]) == [(TOO_LONG, b""), (PING, b"")]  # spec F4


def test_a_cr_counts_towards_the_length_of_a_line() -> None:
    line = b"PING".ljust(limits.MAX_LINE_BYTES) + b"\r\n"
    assert parse([line]) == [(TOO_LONG, b"")]  # spec F4: bytes before LF


def test_a_long_line_is_refused_before_its_end_has_come() -> None:
    connection = HostConnection()
    assert connection.receive_data(b"x" * limits.MAX_LINE_BYTES) is None
    assert connection.receive_data(b"x") == TOO_LONG  # spec F4: as soon as it is passed
    assert connection.next_message() is None
    assert connection.receive_data(b"x" * 100_000) is None
    assert connection.receive_data(b"PING\n") is None, "the end of the long line"
    assert connection.receive_data(b"PING\n") == PING


def test_two_long_lines_are_two_refusals() -> None:
    line = b"x" * 70_000 + b"\n"
    assert parse([line, line]) == [(TOO_LONG, b"")] * 2  # spec F3, F4
    assert parse([line + line]) == [(TOO_LONG, b"")] * 2


def test_a_remembered_line_inside_a_long_one_is_no_request() -> None:
    connection = HostConnection()
    assert connection.receive_data(b"READ 1000 5\n") == messages.Read(b"1000", 5)
    assert connection.receive_data(b"x" * 70_000) == TOO_LONG
    # spec F4: what ends the long line looks exactly like a request seen before.
    assert connection.receive_data(b"READ 1000 5\n") is None
    assert connection.receive_data(b"READ 1000 5\n") == messages.Read(b"1000", 5)


def test_a_remembered_line_behind_a_begun_one_is_its_end() -> None:
    connection = HostConnection()
    assert connection.receive_data(b"READ 1000 5\n") == messages.Read(b"1000", 5)
    assert connection.receive_data(b"STAT true ") is None
    name = messages.Stat(True, b"READ 1000 5")
    assert connection.receive_data(b"READ 1000 5\n") == name  # spec F1


# F5, what a number is


@pytest.mark.parametrize("number", [b"0", b"00", b"7", b"0010", b"9" * 18])
def test_a_number_is_one_to_18_digits(number: bytes) -> None:
    assert message(b"SEEK 1000 " + number) == messages.Seek(b"1000", int(number))


@pytest.mark.parametrize(
    "token",
    [
        *(b"-1", b"+1", b"1_000", b"0x10", b"1e3", b"1.0", b"1,000", b"abc"),
        *(b"9" * 19, b"0" * 19, "\u0661".encode(), "\u00b2".encode(), b"\xb2"),
    ],
)
def test_nothing_else_is_a_number_and_the_token_is_echoed(token: bytes) -> None:
    # spec F5
    assert reply(b"READ 1000 " + token) == b"ERROR invalid size: " + token + b"\n"
    assert reply(b"CLOSE " + token) == b"ERROR invalid fileno: " + token + b"\n"


def test_digits_by_the_thousand_are_no_number() -> None:
    token = b"1" * 60_000  # spec F5; int() itself refuses more than 4,300
    assert reply(b"CLOSE " + token) == b"ERROR invalid fileno: " + b"1" * 200 + b"\n"


# F6, what an error repeats


@pytest.mark.parametrize(
    "line",
    [
        b"%b",
        b"CLOSE %b",
        b"READ 1000 %b",
        b"WRITE 1000 %b",
        b"OPEN a %b true",
        b"OPEN a r %b",
        b"STAT %b a",
        b"LLM_CHAT %b 0 0 0 0",
        b"LLM_CHAT true 0 0 %b 0",
        b"FD_PUT %b",
    ],
)
def test_an_echo_is_short_and_holds_no_control_byte(line: bytes) -> None:
    control = bytes({*range(32), 127} - set(b"\n\t"))
    evil = b"a" + control + b"b" * 500
    answer = reply(line % evil)
    echoed = answer.partition(b": ")[2].removesuffix(b"\n")
    clean = b"a" + b"?" * len(control) + b"b" * 500
    assert echoed == clean[:200]  # spec F6


def test_an_echo_keeps_what_is_not_ascii() -> None:
    word = "réécrire".encode()
    assert reply(word) == b"ERROR unknown command: " + word + b"\n"  # spec F6


# F7 and F8, begun and not complete


def test_a_partial_line_is_no_message() -> None:
    assert parse([b"PING\nREAD 1000 5"]) == [(PING, b"")]  # spec F7


@pytest.mark.parametrize(
    ("stream", "begun"),
    [
        (b"", False),
        (b"PING\n", False),
        (b"P", True),
        (b"PING\nP", True),
        (b"WRITE 1000 5\n", True),
        (b"WRITE 1000 5\nabcd", True),
        (b"WRITE 1000 5\nabcde", False),
        (b"WRITE 1000 0\n", False),
        (b"x" * 70_000, True),
        (b"x" * 70_000 + b"\n", False),
        (b"x" * 70_000 + b"\nP", True),
    ],
)
def test_a_message_that_has_begun_is_known(stream: bytes, begun: bool) -> None:
    for pieces in ([stream], [stream[:7], stream[7:]]):
        connection = HostConnection()
        for piece in pieces:
            _drain(connection, connection.receive_data(piece))
        assert connection.is_mid_message is begun  # spec F8


def _drain(connection: HostConnection, first: messages.Request | None) -> None:
    message = first
    while message is not None or (connection.body_left and connection.take_body()):
        message = None if connection.body_left else connection.next_message()


# F9, what is too much


@pytest.mark.parametrize(
    "word", [b"LLM_QUOTA", b"LLM_CONFIG", b"PING", b"CAPS", b"ATTACH"]
)
def test_a_command_without_parameters_takes_none(word: bytes) -> None:
    assert (
        reply(word + b" x") == b"ERROR " + word + b" takes no parameters\n"
    )  # spec F9


@pytest.mark.parametrize("line", [b"CLOSE 1000 1", b"CLOSE 1 2 3", b"CLOSE"])
def test_close_requires_one_fileno(line: bytes) -> None:
    assert reply(line) == b"ERROR CLOSE requires fileno\n"  # spec F9, C1
