"""The grammar of the FS Proxy wire: lines to messages, and back.

Rules of this file.

1. Only ``commands`` lists words and their parameters: the parser (``parse_request``)
   and the formatter (``format_request``) read its table.
2. A line is parsed by the first rule that fits its command: names swallow blanks, so a
   command with a name is cut from both ends, every other one at its blanks (spec F1).
3. A line that does not parse becomes a ``Refusal`` with its whole reply (spec F3) and
   with the payload that must be drained first (spec W4).  Nothing here raises on what
   a peer sends.
4. Checks run in the order of the parameters, the count first (spec R2, W6, O4).
"""

from __future__ import annotations

from protocol import messages as m
from protocol.commands import (
    BY_MESSAGE,
    COMMANDS,
    FILENO,
    MODES,
    NAME,
    Command,
    echo,
    error,
    invalid,
    is_number,
)
from protocol.limits import MAX_CHAT_BYTES, MAX_DIGITS

TYPE_CHECKING = False  # typing itself would cost a child 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable

    Quick = Callable[[list[bytes], int], m.Request | None]

_FLAGS = {b"true": True, b"false": False}
_CONTEXTS = {b"user": True, b"internal": False}
_FLAG_WORDS = {True: b"true", False: b"false"}
_CONTEXT_WORDS = {True: b"user", False: b"internal"}
_NUMBERS = ("fileno", "number", "length")
_BLANKS = b" \t"
_TAB = 9  # CPython finds a byte given as a number in an eighth of the time
# Only space and tab are blanks (spec F1); bytes.split() would also cut at these three.
_FALSE_BLANKS = (b"\r", b"\x0b", b"\x0c")


def _quick_parser(  # noqa: C901 - five small closures
    message: Callable[..., m.Request], kinds: tuple[str, ...]
) -> Quick | None:
    """Return a parser for correct lines of a frequent shape, None for other shapes.

    The full parser walks the parameters of a row and costs 2 us a line; a client that
    opens and closes many small files would spend a quarter of its time there.
    """

    def no_parameter(tokens: list[bytes], _: int) -> m.Request | None:
        return message() if len(tokens) == 1 else None

    def one_number(tokens: list[bytes], _: int) -> m.Request | None:
        if len(tokens) == 2:
            token = tokens[1]
            if token.isdigit() and len(token) <= MAX_DIGITS:
                return message(token)
        return None

    def two_numbers(tokens: list[bytes], _: int) -> m.Request | None:
        if len(tokens) == 3:
            _word, token, size = tokens
            if (
                token.isdigit()
                and size.isdigit()
                and len(token) <= MAX_DIGITS
                and len(size) <= MAX_DIGITS
            ):
                return message(token, int(size))
        return None

    def name_mode_flag(tokens: list[bytes], dialect: int) -> m.Request | None:
        if len(tokens) != 4 or dialect != 2:
            return None
        _, name, mode, word = tokens
        flag = _FLAGS.get(word)
        # A tab would be a blank (spec F1); no name at all means two blanks in a row.
        if flag is None or mode not in MODES or not name or _TAB in name:
            return None
        return message(name, mode, flag)

    shapes = {
        (): no_parameter,
        ("fileno",): one_number,
        ("fileno", "number"): two_numbers,
        ("fileno", "length"): two_numbers,
        ("name", "mode", "flag"): name_mode_flag,
    }
    return shapes.get(kinds)


QUICK: dict[bytes, Quick] = {
    row.word: quick
    for row in COMMANDS.values()
    if (quick := _quick_parser(row.message, tuple(kind for kind, _ in row.params)))
}
"""Parsers of the frequent shapes, by command word."""

_OPEN1_REQUIRES = error(b"OPEN requires filename and mode")
_EMPTY = m.Refusal(error(b"empty request"))


def parse_request(line: bytes, dialect: int) -> m.Request:
    """Parse one request line.

    Args:
        line: the bytes before LF, which is not among them.
        dialect: 1 or 2; only OPEN differs (spec O5).

    Returns:
        The request, or a ``Refusal`` with the error that answers the line.
    """
    tokens = line.split(b" ")  # exact: a line with other blanks fits no shape below
    quick = QUICK.get(tokens[0])
    if quick is not None:
        message = quick(tokens, dialect)
        if message is not None:
            return message
    return _parse_any(line, dialect)


def _parse_any(line: bytes, dialect: int) -> m.Request:
    """Parse a line of any shape, faults and all."""
    line = line.removesuffix(b"\r").strip(_BLANKS)
    if not line:
        return _EMPTY
    word, _, rest = line.partition(b" ")
    command = COMMANDS.get(word)
    if command is None:
        word, _, rest = line.replace(b"\t", b" ", 1).partition(b" ")
        command = COMMANDS.get(word)
        if command is None:
            return m.Refusal(error(b"unknown command: " + echo(word)))
    if command.message is m.Open:
        rest = rest.lstrip(_BLANKS)
        return _parse_open1(rest) if dialect == 1 else _parse_open2(command, rest)
    if NAME in command.params:
        return _parse_named(command, rest.lstrip(_BLANKS))
    return _parse_tokens(command, _tokens(rest))


def _tokens(line: bytes) -> list[bytes]:
    for blank in _FALSE_BLANKS:
        if blank in line:
            return [t for t in line.replace(b"\t", b" ").split(b" ") if t]
    return line.split()


def _cut_last(text: bytes) -> tuple[bytes, bytes]:
    """Cut the last token off; the rest keeps its inner blanks (spec O1)."""
    at = max(text.rfind(b" "), text.rfind(b"\t"))
    return text[: max(at, 0)].rstrip(_BLANKS), text[at + 1 :]


def _parse_open2(command: Command, rest: bytes) -> m.Request:
    head, flag = _cut_last(rest)
    name, mode = _cut_last(head)
    if not name:
        return m.Refusal(command.requires)
    if mode not in MODES:
        return m.Refusal(invalid("mode", mode))
    if flag not in _FLAGS:
        return m.Refusal(invalid("is_top_level", flag))
    return m.Open(name, mode, _FLAGS[flag])


def _parse_open1(rest: bytes) -> m.Request:
    head, last = _cut_last(rest)
    if not head:
        return m.Refusal(_OPEN1_REQUIRES)
    name, mode = _cut_last(head)
    context = None
    if name and last in _CONTEXTS:
        context = _CONTEXTS[last]
    elif name and mode in MODES:
        return m.Refusal(invalid("context", last))
    else:
        name, mode = head, last
    if mode not in MODES:
        return m.Refusal(invalid("mode", mode))
    return m.Open(name, mode, context)


def _parse_named(command: Command, rest: bytes) -> m.Request:
    flag = rest.replace(b"\t", b" ").partition(b" ")[0]
    name = rest[len(flag) :].lstrip(_BLANKS)
    if not name:
        return m.Refusal(command.requires)
    if flag not in _FLAGS:
        return m.Refusal(invalid("is_top_level", flag))
    return command.message(_FLAGS[flag], name)  # type: ignore[call-arg]


def _parse_tokens(command: Command, tokens: list[bytes]) -> m.Request:
    if not command.required <= len(tokens) <= len(command.params):
        spare = len(tokens) == len(command.params) + 1 and tokens[-1] in command.spare
        if not spare:
            return _wrong_count(command, tokens)
    values: list[object] = []
    for (kind, _), value in zip(command.params, tokens, strict=False):
        if not _is_valid(kind, value):
            return _bad_token(command, tokens)
        if kind == "flag":
            values.append(_FLAGS[value])
        elif kind in ("fileno", "optional"):
            values.append(value)
        else:
            values.append(int(value))
    message = command.message(*values)
    if command.message is m.Chat and message.body > MAX_CHAT_BYTES:
        text = b"%d exceeds limit %d" % (message.body, MAX_CHAT_BYTES)
        return _drain(command, tokens, invalid("prompt_length", text))
    return message


def _is_valid(kind: str, value: bytes) -> bool:
    if kind == "flag":
        return value in _FLAGS
    return kind not in _NUMBERS or is_number(value)


def _bad_token(command: Command, tokens: list[bytes]) -> m.Request:
    """Refuse a line with the right number of parameters, of which one is invalid.

    The error names the first invalid one.  A WRITE is an exception: its size is checked
    before its fileno, and the host's cap between them (spec W4, W6), so the host refuses
    it.
    """
    wrong = [
        (kind, invalid(name, value))
        for (kind, name), value in zip(command.params, tokens, strict=False)
        if not _is_valid(kind, value)
    ]
    if command.message is m.Write:
        if wrong[-1][0] == "length":
            return m.Refusal(wrong[-1][1])
        return m.Write(tokens[0], int(tokens[1]), m.NO_FILENO)
    fileno = command.params[0] == FILENO and wrong[0][0] != "fileno"
    return _drain(command, tokens, wrong[0][1], tokens[0] if fileno else None)


def _wrong_count(command: Command, tokens: list[bytes]) -> m.Refusal:
    """Refuse a line with too few tokens, which announces nothing, or with too many."""
    if len(tokens) < command.required:
        return m.Refusal(command.requires)
    return _drain(command, tokens, command.requires)


def _drain(
    command: Command, tokens: list[bytes], reply: bytes, fileno: bytes | None = None
) -> m.Refusal:
    """Refuse a line whose payload is drained, if all its lengths parse (spec W4, L2)."""
    lengths = []
    for (kind, _), value in zip(command.params, tokens, strict=False):
        if kind == "length":
            if not is_number(value):
                return m.Refusal(reply)
            lengths.append(int(value))
    parts = tuple(lengths) if command.message is m.Chat else ()
    return m.Refusal(reply, sum(lengths), fileno, parts)


def format_request(request: m.Request, dialect: int = 2) -> bytes:
    """Return the request line of a message, LF included, without its payload.

    Args:
        request: any message of ``COMMANDS``.
        dialect: 1 writes a context in place of the flag of OPEN.

    Raises:
        ValueError: the line would not parse back: a number has more than 18 digits
            (spec F5), a name holds LF, or blanks or CR at an end that the wire strips
            (spec F1).
    """
    command = BY_MESSAGE[type(request)]
    words = (
        _CONTEXT_WORDS if dialect == 1 and command.message is m.Open else _FLAG_WORDS
    )
    parts = [command.word]
    good = True
    for (kind, _), field in zip(command.params, request.fields, strict=True):
        value = getattr(request, field)
        if kind in _NUMBERS:
            part = value if kind == "fileno" else b"%d" % value
            good = good and is_number(part)
            parts.append(part)
        elif value is not None:
            parts.append(words[value] if kind == "flag" else value)
    line = b" ".join(parts)
    if command.is_free:
        good = b"\n" not in line and parse_request(line, dialect) == request
    if not good:
        raise ValueError(f"cannot be sent as a request line: {request!r}")
    return line + b"\n"
