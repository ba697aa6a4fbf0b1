"""``sandhost fd ...``: LLM fds behind FD 3, for shell scripts inside a child.

1. It starts as fast as ``sandhost fs``: it parses arguments by hand.
2. It prints the host's answer unchanged: XML, or the text itself if that was short.  An
   ``fd_error`` is printed too, and the status is 1.
3. A word calls the tool of that name; ``COMMANDS`` has shorter words for frequent ones,
   and their positional arguments.
4. It uses FD 3 itself, turn by turn (spec T5): descriptors belong to the connection.  A
   signal ends it between two turns (``frame.Door``).
5. Content that it puts for a call is used by the call or dropped, on every path: a host
   keeps a limited number of unused contents (``Upload``).
"""

from __future__ import annotations

from vfs.client.shell.frame import (
    FAILED,
    OK,
    Door,
    UsageError,
    pieces,
    quote,
    run,
    write,
)
from vfs.client.turn import client_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "read": ("read_fd", ("fd", "page"), "show a page (or --all, --start-line N ...)"),
    "write-to-file": ("fd_to_file", ("fd", "file_path"), "write it to a file"),
    "search": ("search_fd", ("fd", "query"), "find lines (--regex, --context N ...)"),
    "info": ("fd_info", ("fd",), "tell what it is"),
    "list": ("list_fds", (), "tell what there is"),
    "rename": ("rename_fd", ("fd", "name"), "give it a name"),
    "mark": (
        "mark_fd_section",
        ("fd", "ref_id", "start_line", "end_line"),
        "mark lines",
    ),
    "section": ("get_fd_section", ("fd", "ref_id"), "show marked lines"),
    "sections": ("list_fd_sections", ("fd",), "tell what is marked"),
    "unmark": ("delete_fd_section", ("fd", "ref_id"), "forget a mark"),
    "summarize": ("summarize_fd", ("fd",), "have the model make it short"),
    "checkpoint": ("checkpoint_process", ("label",), "keep everything as it is"),
    "restore": ("restore_process", ("checkpoint_id",), "go back to a checkpoint"),
    "checkpoints": ("list_checkpoints", (), "tell what was kept"),
    "forget": ("delete_checkpoint", ("checkpoint_id",), "delete a checkpoint"),
    "wrap": ("wrap_output", (), "store standard input if it is long, else print it"),
    "wrap-input": ("wrap_input", (), "the same, as the user's input"),
    "temp-create": ("create_temp_file", (), "make a temporary file of standard input"),
    "temp-read": ("read_temp_file", ("temp_file_id",), "show a temporary file"),
    "temp-write": (
        "write_temp_file",
        ("temp_file_id",),
        "replace it by standard input",
    ),
    "temp-delete": ("delete_temp_file", ("temp_file_id",), "remove it"),
}
"""Word -> (call, arguments that need no option, what it does)."""

TAKES_INPUT: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "wrap_output": ("token", (), ("source", "is_error")),
    "wrap_input": ("token", (), ()),
    "create_temp_file": ("content", (), ()),
    "write_temp_file": ("content", ("temp_file_id",), ("version",)),
}
"""Calls that take standard input -> its name, and the other required and optional
arguments.

Here, because standard input goes first and a host keeps it until a call uses it: wrong
arguments must be found before.
"""

WRAPS = ("wrap_output", "wrap_input")
"""Calls that return the text itself if it is short."""

ERROR = "<fd_error "
"""The beginning of the answer of a failed call."""

MOST_TEXT_BYTES = 8 * 1024 * 1024
"""The longest text that a call returns (``supervisor.llmfd`` has the bound)."""

_NUMBERS = frozenset(
    {
        *("page", "start_line", "end_line", "start", "count", "index", "context"),
        *("max_results", "insert_at_line", "version"),
    }
)
_SWITCHES = frozenset(
    {
        *("read_all", "case_sensitive", "regex", "extract_to_new_fd", "create"),
        *("exist_ok", "is_error", "files"),
    }
)
_SHORT = {"all": "read_all", "lines": "lines"}


def main(argv: list[str]) -> int:
    """Run ``sandhost fd`` with the arguments after ``fd``; return the exit status."""
    return run("fd", _run, argv)


def _run(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("--help", "-h", "help") or set(argv[1:]) & {"--help", "-h"}:
        return _print(help_text())
    if not word:
        raise UsageError("no command")
    if word == "put":
        return _put(argv[1:])
    if word == "call":
        return _call(argv[1:])
    if word in COMMANDS:
        name, positional, _ = COMMANDS[word]
    elif word.replace("_", "").isalpha() and "_" in word:
        name, positional = word, ("fd",)
    else:
        raise UsageError(f"unknown command {quote(word)}")
    arguments = _read(word, positional, argv[1:])
    if name in TAKES_INPUT:
        _check(word, name, arguments)
        return _call_with_input(name, arguments)
    return _answer(Door("fd").fd_call(name, **arguments))


def _check(word: str, name: str, arguments: dict[str, object]) -> None:
    """Check the arguments of a call that takes standard input, before it is read.

    Raises:
        UsageError: the host would refuse it.
    """
    _, needed, possible = TAKES_INPUT[name]
    for given in arguments:
        if given not in (*needed, *possible):
            raise UsageError(f"{word} has no option --{given.replace('_', '-')}")
    for wanted in needed:
        if wanted not in arguments:
            raise UsageError(f"{word} takes {_usage(needed)}")


def _call_with_input(name: str, arguments: dict[str, object]) -> int:
    """Put standard input in, make the call that uses it, and print its answer."""
    under = TAKES_INPUT[name][0]
    start = bytearray()
    with Upload(Door("fd")) as content:
        token = content.put_stdin(start)
        arguments[under] = token if under == "token" else {"token": token}
        answer = content.door.fd_call(name, **arguments)
        is_as_it_came = name in WRAPS and answer.encode() == start
        if is_as_it_came or not answer.startswith(ERROR):
            content.keep()
        else:
            content.drop()
    if is_as_it_came:
        return _print(answer)  # even if it looks like an error
    return _answer(answer, is_text=name in WRAPS)


class Upload:
    """Content that is put, and dropped at the end of the block unless a call used it.

    Args:
        door: the connection.
        token: token of an existing content to add to, which is never dropped; None
            begins a new one.

    Attributes:
        door: as above.
    """

    __slots__ = ("_is_ours", "_token", "door")

    def __init__(self, door: Door, token: str | None = None) -> None:
        self.door = door
        self._token = token
        self._is_ours = token is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def put_stdin(self, start: bytearray | None = None) -> str:
        """Put standard input; return its token.

        Args:
            start: a buffer for the beginning of the content, up to just more than the
                longest text that a call returns.
        """
        is_used = False
        for piece in pieces():
            self._token = self.door.fd_put(piece, self._token)
            is_used = True
            if start is not None and len(start) <= MOST_TEXT_BYTES:
                start += piece
        if not is_used or self._token is None:
            # Without a piece the host has not seen the token, and may not know it.
            self._token = self.door.fd_put(b"", self._token)
        return self._token

    def keep(self) -> None:
        """Keep the content: a call has used it, or the user has its token."""
        self._is_ours = False

    def drop(self) -> None:
        """Let the host drop the content, unless it is kept.

        The host returns an error's text, or refuses a long one, and keeps it in neither
        case; if a call has already used the token, only this answer differs.
        """
        # If a signal came with the reply, only ``last_ok`` has the token.
        token = self._token or self.door.last_ok.decode()
        if not self._is_ours or not token or self.door.is_lost:
            return
        self.keep()
        try:
            self.door.fd_call("wrap_output", token=token, is_error=True)
        except client_errors().FsProxyError:
            return  # the first failure is reported


def _answer(answer: str, *, is_text: bool = False) -> int:
    """Print an answer: XML as lines, a returned text unchanged."""
    is_xml = not is_text or answer.startswith(("<fd_result ", ERROR))
    _print(answer + "\n" if is_xml and not answer.endswith("\n") else answer)
    return FAILED if answer.startswith(ERROR) else OK


def _call(words: list[str]) -> int:
    """``call NAME JSON``: any call with any arguments."""
    import json  # noqa: PLC0415 - for this command only

    if not 1 <= len(words) <= 2:
        raise UsageError("call takes a name and a JSON object")
    try:
        arguments = json.loads(words[1]) if len(words) > 1 else {}
    except ValueError as why:
        raise UsageError(f"not JSON: {why}") from None
    if not isinstance(arguments, dict):
        raise UsageError("the arguments are not a JSON object")
    return _answer(Door("fd").fd_call(words[0], **arguments))


def _put(words: list[str]) -> int:
    """``put [TOKEN]``: put standard input as content; print its token."""
    if len(words) > 1:
        raise UsageError("put takes at most a token")
    with Upload(Door("fd"), *words) as content:
        _print(content.put_stdin() + "\n")
        content.keep()
    return OK


def _read(
    word: str, positional: tuple[str, ...], words: list[str]
) -> dict[str, object]:
    """Return the arguments of a command line.

    Raises:
        UsageError: the command line is wrong.
    """
    found: dict[str, object] = {}
    free = iter(positional)
    rest = iter(words)
    literal = False
    for item in rest:
        if item == "--" and not literal:
            literal = True
        elif item.startswith("--") and not literal:
            name, equals, value = item[2:].partition("=")
            name = _SHORT.get(name, name).replace("-", "_")
            if name.removeprefix("no_") in _SWITCHES and not equals:
                found[name.removeprefix("no_")] = not name.startswith("no_")
                continue
            if not equals:
                value = _value(item, rest)
            _enter(found, name, value)
        else:
            name = next(free, "")
            if not name:
                raise UsageError(f"{word} takes {_usage(positional) or 'no argument'}")
            _enter(found, name, item)
    return found


def _value(option: str, rest: Iterator[str]) -> str:
    for value in rest:
        return value
    raise UsageError(f"{option} needs a value")


def _enter(found: dict[str, object], name: str, value: str) -> None:
    if name == "lines":
        first, dash, last = value.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise UsageError("--lines takes FIRST-LAST, FIRST- (to the end) or a line")
        _enter(found, "start_line", first)
        if last or not dash:
            _enter(found, "end_line", last or first)
    elif name in _NUMBERS:
        if not value.removeprefix("-").isdigit() or not value.isascii():
            raise UsageError(f"--{name.replace('_', '-')} takes a number")
        found[name] = int(value[:100])
    elif name in _SWITCHES:
        if value not in ("true", "false"):
            raise UsageError(f"--{name.replace('_', '-')} takes true or false")
        found[name] = value == "true"
    else:
        found[name] = value


def _usage(positional: tuple[str, ...]) -> str:
    return " ".join(name.upper() for name in positional)


def help_text() -> str:
    """Return the text of ``--help``."""
    rows = "".join(
        f"  {word:14}{_usage(names):36}{about}\n"
        for word, (_, names, about) in COMMANDS.items()
    )
    return (
        "usage: sandhost fd COMMAND [ARGUMENT]... [--PARAMETER VALUE]...\n\n"
        "Large contents that the host keeps for this child's model.\n\n"
        f"{rows}"
        f"  {'put':14}{'[TOKEN]':36}standard input as content; print its token\n"
        f"  {'call':14}{'NAME JSON':36}any call\n"
        "\nEvery parameter of a call is an option: --start-line 3, --regex, --no-create.\n"
        "Lines are also --lines 3-5, --lines 3- (to the end) or --lines 3 (that one).\n"
        "\nexample: make test 2>&1 | sandhost fd wrap --source tool:make\n"
        "\nexit status: 0 done, 1 the host reports an error, 2 wrong usage or not in a"
        " child\n"
    )


def _print(text: str) -> int:
    write(text.encode())
    return OK
