"""A child's side of ToolExec: runs a tool and yields its output as it comes.

    done = ToolClient().run("make", "-j2", on_output=sys.stdout.buffer.write)
    sys.exit(done.exit_code)

1. Only ``run`` keeps output.
2. The exit code is that of the trailer.  A reply that ends before its trailer is a broken
   line, never an end.
3. After a broken line a detached execution is continued by a new request; any other
   execution ends with its line.
4. Standard library only; ``socket`` is loaded by the first request.
"""

from __future__ import annotations

import os

from vfs.client.tools_wire import BrokenLineError, ToolError, ToolServer, encode, pause

__all__ = ["BrokenLineError", "Completed", "Execution", "ToolClient", "ToolError"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import FrameType, TracebackType
    from typing import Self, TypeAlias

    from vfs.client.tools_wire import HttpReply

    Name: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

ANSWER_TIMEOUT_S = 30.0
"""Longest wait for the answer to a signal, which is short."""

RESUMES = 5
"""Most broken lines in a row, without a byte between, before a client gives up."""

BUSY = 503
"""The status of a busy host; the client tries again.  Other refusals are final."""

RESUME_PAUSE_S = 0.2
"""Pause before the first new request; doubles each time."""

FORWARDED = ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP")
"""Signals of this process that ``run`` passes on to the tool."""


class Completed:
    """A tool that has ended.

    Attributes:
        exit_code: exit status; 128+n after signal n.
        output: stdout and stderr in true order; empty if ``on_output`` got it.
        exec_id: id of the execution.
    """

    def __init__(self, exit_code: int, output: bytes, exec_id: str) -> None:
        self.exit_code = exit_code
        self.output = output
        self.exec_id = exec_id


class ToolClient:
    """A client of one ToolExec server, with one token.

    Args:
        url: ``http://HOST:PORT/exec`` or ``unix://PATH``; None: ``AIFO_TOOLEEXEC_URL``.
        token: the child's token; None: ``AIFO_TOOLEEXEC_TOKEN``.

    Raises:
        ToolError: URL or token is missing, or the URL cannot be used.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._endpoint = ToolServer(url, token)

    def narrowed_token(
        self, *, tools: Iterable[str] | None = None, root: bool = True
    ) -> str:
        """Return a token with fewer rights, without a request to the host.

        It sees its own executions only, and ends with the token it is made from.

        Args:
            tools: the only tools that it may run; None leaves all.
            root: its tools may work in the child's root; else in workspaces of sidecars
                only.
        """
        from protocol.toolexec.token import narrow_token  # noqa: PLC0415 - rarely used

        name = os.urandom(8).hex()
        return narrow_token(self._endpoint.token, name, tools=tools, root=root)

    def run(
        self,
        tool: str,
        *args: str | bytes,
        cwd: Name | None = None,
        on_output: Callable[[bytes], object] | None = None,
        forward_signals: bool = True,
        detach: bool = False,
    ) -> Completed:
        """Run a tool to its end, and return its result.

        Args:
            tool: name of the tool.
            args: its arguments.
            cwd: its directory; None for this process's.
            on_output: called with output as it comes; None collects it.
            forward_signals: pass SIGINT, SIGQUIT, SIGTERM and SIGHUP on to it (only in
                the main thread, where Python delivers signals).
            detach: the tool survives a broken line, and is asked for again.

        Raises:
            ToolError: the host refused.
            BrokenLineError: the line broke before the end.
            OSError: the host cannot be reached.
        """
        pieces: list[bytes] = []
        take = pieces.append if on_output is None else on_output
        with self.start(tool, *args, cwd=cwd, detach=detach) as execution:
            previous = _forward(execution) if forward_signals else {}
            try:
                for piece in execution:
                    take(piece)
            finally:
                _restore(previous)
        code = execution.exit_code
        if code is None:
            raise BrokenLineError("the tool's end is not known")
        return Completed(code, b"".join(pieces), execution.id)

    def start(
        self,
        tool: str,
        *args: str | bytes,
        cwd: Name | None = None,
        detach: bool = False,
        exec_id: str | None = None,
    ) -> Execution:
        """Start a tool; the caller iterates over the result, and closes it.

        Args:
            tool: name of the tool.
            args: its arguments.
            cwd: its directory; None for this process's.
            detach: the tool survives a broken line, and is asked for again.
            exec_id: id of the execution; None makes one.

        Raises:
            ToolError: the host refused.
            OSError: the host cannot be reached.
        """
        name = exec_id or os.urandom(16).hex()
        where = os.getcwdb() if cwd is None else os.fsencode(cwd)
        form = [(b"tool", tool.encode()), (b"cwd", where)]
        form += [(b"arg", os.fsencode(arg)) for arg in args]
        headers = {b"X-Aifo-Exec-Id": name.encode()}
        if detach:
            headers[b"X-Aifo-Detach"] = b"1"
        execution = Execution(self._endpoint, name, resumes=detach)
        execution.begin(headers, encode(form))
        return execution

    def attach(self, exec_id: str, offset: int = 0) -> Execution:
        """Follow a running execution, or the kept output of an ended one.

        Args:
            exec_id: id of the execution.
            offset: number of bytes of its output that are known already.

        Raises:
            ToolError: 404: there is none; 416: that part is not kept any more.
        """
        execution = Execution(self._endpoint, exec_id, resumes=True, offset=offset)
        execution.ask_again()
        return execution

    def signal(self, exec_id: str, name: str = "TERM") -> bool:
        """Signal a running tool; return whether there was one.

        Raises:
            ToolError: the host refused.
        """
        return _signal(self._endpoint, exec_id, name)


class Execution:
    """A started tool, as an iterable of its output.

    Attributes:
        id: id of the execution.
        offset: number of bytes of its output that were yielded.
        exit_code: the exit code; None before the end of the output.
    """

    def __init__(
        self, endpoint: ToolServer, exec_id: str, *, resumes: bool, offset: int = 0
    ) -> None:
        self.id = exec_id
        self.offset = offset
        self.exit_code: int | None = None
        self._endpoint = endpoint
        self._resumes = resumes
        self._reply: HttpReply | None = None

    def __iter__(self) -> Iterator[bytes]:
        """Yield output as it comes, then set the exit code.

        Raises:
            BrokenLineError: the line broke, and new requests did not help.
            ToolError: the host refused, for another reason than being busy.
        """
        misses = 0
        while self.exit_code is None:
            before = self.offset
            try:
                if self._reply is None:
                    self.ask_again()
                yield from self._pieces()
            except (ConnectionError, TimeoutError, ToolError) as why:
                self.close()
                if isinstance(why, ToolError) and why.status != BUSY:
                    raise
                misses = 0 if self.offset > before else misses + 1
                if not self._resumes or misses > RESUMES:
                    text = f"the line to execution {self.id} broke: {why}"
                    raise BrokenLineError(text) from why
                pause(RESUME_PAUSE_S * 2**misses)

    def wait(self) -> int:
        """Drop the rest of the output, and return the exit code."""
        for _ in self:
            pass
        if self.exit_code is None:
            raise BrokenLineError(f"the end of execution {self.id} is not known")
        return self.exit_code

    def signal(self, name: str = "TERM") -> bool:
        """Signal the tool; return whether it was running."""
        return _signal(self._endpoint, self.id, name)

    def close(self) -> None:
        """Close the line; this ends a tool that was not started detached."""
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        why: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, headers: Mapping[bytes, bytes], form: bytes) -> None:
        """Request the execution.

        Raises:
            ToolError: the host refused.
            OSError: the host cannot be reached.
        """
        try:
            self._take(self._endpoint.request(b"POST", b"/exec", headers, form))
        except BrokenLineError:
            # It may have begun; a detached one can be asked for again.
            if not self._resumes:
                raise

    def ask_again(self) -> None:
        """Request the output from ``offset`` on.

        Raises:
            ToolError: 404: there is no such execution; 416: that part is not kept.
            OSError: the host cannot be reached.
        """
        target = b"/exec/%b?from=%d" % (self.id.encode(), self.offset)
        self._take(self._endpoint.request(b"GET", target, {}, b""))

    def _take(self, reply: HttpReply) -> None:
        if reply.status != 200:
            try:
                raise reply.refusal()
            finally:
                reply.close()
        self._reply = reply

    def _pieces(self) -> Iterator[bytes]:
        reply = self._reply
        if reply is None:
            raise BrokenLineError("nothing was asked for")
        for piece in reply.body:
            self.offset += len(piece)
            yield piece
        code = reply.exit_code()
        if code is None:
            raise BrokenLineError("the reply has no exit code")
        self.exit_code = code
        self.close()


def _signal(endpoint: ToolServer, exec_id: str, name: str) -> bool:
    form = encode([(b"exec_id", exec_id.encode()), (b"signal", name.encode())])
    reply = endpoint.request(b"POST", b"/signal", {}, form, ANSWER_TIMEOUT_S)
    try:
        if reply.status == 404:
            return False
        if reply.status != 204:
            raise reply.refusal()
        return True
    finally:
        reply.close()


def _forward(execution: Execution) -> dict[int, object]:
    """Install handlers that pass signals on to the tool; return the old handlers."""
    import signal  # noqa: PLC0415 - only here, and it is not light

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        try:  # contextlib is not light
            execution.signal(signal.Signals(number).name)
        except OSError:
            return  # a broken line, which its reader will see

    previous: dict[int, object] = {}
    for name in FORWARDED:
        number = getattr(signal, name)
        try:
            previous[number] = signal.signal(number, hand_on)
        except ValueError:  # not the main thread
            return {}
    return previous


def _restore(previous: Mapping[int, object]) -> None:
    for number, handler in previous.items():
        import signal  # noqa: PLC0415

        signal.signal(number, handler)  # type: ignore[arg-type]
