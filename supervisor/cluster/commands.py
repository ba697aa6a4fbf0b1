"""Commands in a child that runs `command_server`, asked from any node.

A request is a piece of the child's input; answers stand in its log, which is read from
where it ended before the request. So an answer outlives a node actor, and a reader.
"""

from __future__ import annotations

import base64
import json
import math
import os
import secrets
import select
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from supervisor.control.client import ControlError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from supervisor.cluster.client import FleetClient

T = TypeVar("T")

PIECE_BYTES = 32_768
"""Most bytes of input in one request: in base64 twice they fit into a line."""

MOST_REQUEST_BYTES = 48_000
"""Longest request: in base64 it fits into a line."""

TOOK_BYTES = 256 * 1024
"""Bytes of output after which the sender is told that they were taken."""

PAUSE_S = 0.2
"""Time from a question that was cut off to the next attempt."""

MAY_BE_DONE = "what was asked may be done all the same"
"""Part of an error about a request whose outcome is not known."""

PATIENCE_S = 15.0
"""Longest wait for a part of the fleet that has ended; Ray starts it within 2 s."""

TELL_S = 5.0
"""Time without an answer after which a command tells that it still asks (FL11)."""


class FleetChildError(Exception):
    """A child of the fleet cannot do what is asked; the text says why."""


class CommandTimeoutError(FleetChildError, TimeoutError):
    """A command was ended, for its time was up.

    Attributes:
        out: its stdout until then.
        err: its stderr until then.
    """

    def __init__(self, text: str, out: bytes, err: bytes) -> None:
        super().__init__(text)
        self.out = out
        self.err = err


class CommandResult(NamedTuple):
    """The end of a command.

    Attributes:
        status: its exit status, 128+n by signal.
        out: all that it wrote to its stdout.
        err: all that it wrote to its stderr.
        duration_s: from the request to the answer.
    """

    status: int
    out: bytes
    err: bytes
    duration_s: float


class Seat(NamedTuple):
    """One incarnation of a child, and its node."""

    node: str
    name: str
    child: str  # its id: a name is used again
    incarnation: int


class Commands:
    """The commands of one child.

    Args:
        client: asks the fleet.
        seat: the child.
    """

    def __init__(self, client: FleetClient, seat: Seat) -> None:
        self._client = client
        self._seat = seat
        self._log_end: int | None = None  # as it was told last

    def check(self) -> None:
        """Return once the child has answered: its walls are up, and it takes commands.

        Raises:
            FleetChildError: it has ended, or its node is lost.
        """
        self._do({"do": "check"})

    def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        data: bytes = b"",
    ) -> CommandResult:
        """Run a command in the child, and return its status and output.

        Args:
            command: program and arguments; no shell reads them.
            timeout_s: after it the command is killed.
            cwd: a directory as the child sees it; None for its workspace.
            env: variables beside the child's own.
            data: the standard input of the command.

        Raises:
            TypeError: a word or a variable is no text, or the time is no number.
            ValueError: there is no program.
            FileNotFoundError: the child finds no such program, or no such directory.
            PermissionError: it may not execute it.
            CommandTimeoutError: the time was up; it has the output so far.
            FleetChildError: the child has ended, or its node is lost.
        """
        _check_request(command, timeout_s, env or {})
        begun_s = time.monotonic()
        request = {
            "do": "run",
            "command": list(command),
            "cwd": cwd,
            "env": dict(env or {}),
            "timeout_s": timeout_s,
            "has_input": bool(data),
        }
        out, err, over = self._do(request, data)
        if over.get("is_late"):
            text = (
                f"{command[0]!r} in {self._seat.name} was ended after {timeout_s:g} s"
            )
            raise CommandTimeoutError(text, out, err)
        return CommandResult(over["status"], out, err, time.monotonic() - begun_s)

    def read(self, path: str) -> bytes:
        """Return the content of a file, as the child may read it.

        Args:
            path: from its workspace, or absolute as the child sees it.

        Raises:
            OSError: as of `open`.
            FleetChildError: the child has ended, or its node is lost.
        """
        return self._do({"do": "read", "path": path})[0]

    def write(
        self, path: str, data: bytes, *, append: bool = False, parents: bool = False
    ) -> None:
        """Write a file, as the child may write it.

        Args:
            path: as for `read`.
            data: its content, or what comes behind it.
            append: keep what is in it.
            parents: make the directories above it.

        Raises:
            OSError: as of `open`.
            FleetChildError: the child has ended, or its node is lost.
        """
        words = {"do": "write", "path": path, "append": append, "parents": parents}
        self._do(words, data, is_sent=True)

    def _do(
        self, request: dict[str, Any], data: bytes = b"", *, is_sent: bool = False
    ) -> tuple[bytes, bytes, dict[str, Any]]:
        """Return what came on both streams, and the outcome."""
        key = secrets.token_hex(8)
        try:
            offset = self._send({"id": key, **request})
            if data or is_sent:
                self._send_input(key, data)
            return self._collect(key, offset)
        except BaseException:
            self._give_up(key)
            raise

    def _collect(
        self, key: str, offset: int | None
    ) -> tuple[bytes, bytes, dict[str, Any]]:
        parts: dict[str, list[bytes]] = {"out": [], "err": []}
        taken = told = 0
        for answer in self._answers(key, offset):
            over = answer.get("over")
            if over is not None:
                if "errno" in over:
                    code = over["errno"]
                    raise OSError(code, os.strerror(code), over["path"])
                return b"".join(parts["out"]), b"".join(parts["err"]), over
            for stream in parts.keys() & answer.keys():
                piece = base64.b64decode(answer[stream])
                parts[stream].append(piece)
                taken += len(piece)
            if taken - told >= TOOK_BYTES:
                told = taken
                self._send({"id": key, "do": "took", "bytes": taken})
        raise AssertionError("answers end with an outcome")

    def _send_input(self, key: str, data: bytes) -> None:
        at = 0
        while True:
            piece = data[at : at + PIECE_BYTES]
            words = {
                "id": key,
                "do": "input",
                "at": at,
                "data": base64.b64encode(piece).decode(),
                "end": at + len(piece) == len(data),
            }
            self._send(words)
            at += len(piece)
            if at == len(data):
                return

    def _give_up(self, key: str) -> None:
        """End a request without a waiting caller; its child may have ended."""
        with suppress(ControlError):
            self._client.ask("on", self._input({"id": key, "do": "end"}))

    def _send(self, request: dict[str, Any]) -> int | None:
        """Send a request; return where the child's log ended before, None if not known.

        Raises:
            FleetChildError: it is too long, or the child is not there any more.
        """
        words = self._input(request)
        before = self._log_end
        is_repeated = False

        def look() -> None:
            nonlocal is_repeated
            is_repeated = True
            self._check_there()

        try:
            while not (answer := ask_again(self._client, "on", words, look))[
                "is_taken"
            ]:
                if answer["is_closed"]:
                    raise self._gone() or FleetChildError(
                        f"cannot ask {self._seat.name}: it takes no more commands; make"
                        " another child"
                    )
                pause()
        except ControlError as why:
            self._check_there()
            is_refused = isinstance(why, RefusedError) and not is_repeated
            doubt = "" if is_refused else f"; {MAY_BE_DONE}"
            raise FleetChildError(f"{why}{doubt}") from None
        self._log_end = int(answer["log_end"])
        # The first attempt may have been taken, and answered since.
        return before if is_repeated else self._log_end

    def _input(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what brings a request to the child.

        Raises:
            FleetChildError: it is too long.
        """
        data = json.dumps(request).encode() + b"\n"
        if len(data) > MOST_REQUEST_BYTES:
            raise FleetChildError(
                f"cannot ask {self._seat.name}: a command with its environment has at"
                f" most {MOST_REQUEST_BYTES} bytes; put the rest into a file"
            )
        args = {
            "name": self._seat.name,
            "data": base64.b64encode(data).decode(),
            "child": self._seat.child,
            "incarnation": self._seat.incarnation,
        }
        return {"node": self._seat.node, "do": "input", "args": args}

    def _check_there(self) -> None:
        """Return if the child may be there, without waiting for a part that is away.

        Raises:
            FleetChildError: it is not.
        """
        try:
            row = self._client.ask("find", {"name": self._seat.name})
        except RefusedError as why:
            raise FleetChildError(str(why)) from None
        except ControlError:
            return
        gone = self._end_of(row)
        if gone is not None:
            raise gone

    def _answers(self, key: str, offset: int | None) -> Iterator[dict[str, Any]]:
        """Yield the answers to a request, the outcome last.

        Raises:
            FleetChildError: the child has ended, or its node is lost.
        """
        for line in self._lines(offset):
            # The first line may have begun before the request.
            answer = json.loads(line) if line.startswith(b'{"id"') else {}
            if answer.get("id") == key:
                yield answer
                if "over" in answer:
                    return

    def _lines(self, offset: int | None) -> Iterator[bytes]:
        """Yield the lines of the child's log, for as long as it runs.

        Args:
            offset: of the first byte; None for the first that is kept.

        Raises:
            FleetChildError: bytes are missing, or the child is over.
        """
        pending = b""
        patience = Patience()
        what = f"cannot read the answer of {self._seat.name}"
        while True:
            words = {"follow": True, "offset": offset}
            try:
                for entry in self._client.logs(self._seat.name, words):
                    if entry.missed:
                        raise FleetChildError(
                            f"{what}: {entry.missed} bytes of its log were removed, or"
                            f" lost by a full disk; {MAY_BE_DONE}"
                        )
                    patience.renew()
                    offset = entry.offset + len(entry.data)
                    *lines, pending = (pending + entry.data).split(b"\n")
                    yield from lines
            except RefusedError as why:
                if patience.is_over(str(why)):
                    self._check_there()
                    raise FleetChildError(f"{what}: {why}; {MAY_BE_DONE}") from None
            except ControlError:  # all that was said is still there
                patience.renew()
            gone = self._gone()
            if gone is not None:
                raise gone
            pause()

    def _gone(self) -> FleetChildError | None:
        """Return what says that the child is over; None if it may be there."""
        name = self._seat.name
        try:
            row = ask_again(self._client, "find", {"name": name})
        except ControlError as why:
            return FleetChildError(str(why))
        return self._end_of(row)

    def _end_of(self, row: dict[str, Any]) -> FleetChildError | None:
        """Return what says that a child is over that the fleet shows so."""
        name = self._seat.name
        found = row["id"], row["incarnation"]
        is_same = found == (self._seat.child, self._seat.incarnation)
        if is_same and row["state"] in {"running", "unknown"}:
            return None
        reason = row["reason"] or f"its exit status is {row['status']}"
        state = row["state"] if is_same else "another one by now"
        return FleetChildError(f"{name} on node {self._seat.node} is {state}: {reason}")


def _check_request(
    command: Sequence[str], timeout_s: float | None, env: Mapping[str, str]
) -> None:
    """Raise if a command is none, before anything is sent."""
    if isinstance(command, str | bytes):
        raise TypeError(
            f"cannot run {command!r}: a command is a list of words; for a shell's line"
            ' write ["sh", "-c", LINE]'
        )
    if not command:
        raise ValueError("cannot run []: a command begins with its program")
    for word in (*command, *env.keys(), *env.values()):
        if not isinstance(word, str):
            raise TypeError(
                f"cannot run {command[0]!r}: {word!r} is no str; convert it"
            )
    is_time = isinstance(timeout_s, int | float) and not math.isnan(timeout_s)
    if timeout_s is not None and not is_time:
        raise TypeError(
            f"cannot run {command[0]!r}: its time is {timeout_s!r}; give seconds, or None"
        )


def ask_again(
    client: FleetClient,
    do: str,
    args: dict[str, Any],
    look: Callable[[], None] = lambda: None,
) -> Any:
    """Return what the door answers, also where a part of the fleet is started again.

    Args:
        client: asks the fleet.
        do: the request.
        args: its arguments.
        look: called before each further attempt; may raise to give up.

    Raises:
        RefusedError: it refuses.
        ControlError: there is no answer for `PATIENCE_S`.
    """
    return try_again(client, partial(client.ask, do, args), look)


def try_again(
    client: FleetClient,
    use: Callable[[], T],
    look: Callable[[], None] = lambda: None,
) -> T:
    """Return what a use of the door returns, also where it is away for a while.

    Args:
        client: its ``tell`` gets the fault, once there was no answer for long.
        use: asks the door.
        look: as for `ask_again`.

    Raises:
        RefusedError: the door refuses.
        ControlError: there is no answer for `PATIENCE_S`.
    """
    patience = Patience(client.tell)
    while True:
        try:
            return use()
        except RefusedError:
            raise
        except ControlError as why:
            if patience.is_over(str(why)):
                raise
        look()
        pause()


class Patience:
    """How long faults in a row are borne: `PATIENCE_S` from the first one.

    Args:
        tell: gets the first fault that is borne `TELL_S` after this was made.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _text: None) -> None:
        self._tell = tell
        self._tell_at_s = time.monotonic() + TELL_S
        self._until_s = math.inf

    def is_over(self, text: str) -> bool:
        """Note a fault; return whether it is borne no longer."""
        now_s = time.monotonic()
        self._until_s = min(self._until_s, now_s + PATIENCE_S)
        if now_s >= self._until_s:
            return True
        if now_s >= self._tell_at_s:
            self._tell_at_s = math.inf
            self._tell(text)
        return False

    def renew(self) -> None:
        """Begin the patience anew, after a success."""
        self._until_s = math.inf


def wait_placed(client: FleetClient, row: Any) -> Any:
    """Return a child once it has a place, or never will.

    Raises:
        ControlError: the fleet refuses, or does not answer.
        FleetChildError: it has ended, and its name is another child's.
    """
    while row["state"] in {"waiting", "placing"}:
        pause()
        found = ask_again(client, "find", {"name": row["name"]})
        if found["id"] != row["id"]:
            raise FleetChildError(
                f"cannot use {row['name']}: it has ended, and another child has that"
                " name; make another"
            )
        row = found
    return row


def pause() -> None:
    """Wait for the next attempt."""
    select.select((), (), (), PAUSE_S)
