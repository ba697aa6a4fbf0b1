"""The link of a node actor to its daemon: a request, an answer, then frames.

The request and the answer are lines of the control socket; see `LinkArgs`, `LinkAnswer`.
A frame is 4 bytes, its length big-endian, then one message as msgpack.

Rules of this file.

1. The daemon sends messages of a node, the actor those of the directory; others are errors.
2. After an error a reader reads nothing more: its link is to be closed.
3. A link that is closed loses messages and ends nothing: the node goes on, and sends again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

import msgspec

from supervisor.fleet.messages import (
    VERSION,
    FromNode,
    Message,
    RayPlace,
    decode_from_node,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST = "fleet-link"
"""The request to the control socket."""

LEAVE_REQUEST = "fleet-leave"
"""The order that ends a daemon's membership, with the children of the fleet there."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Longest message: a join that lists as many children as a host may have, 84 bytes each."""

MAX_ANSWER_BYTES = 65_536
"""Longest answer, as long as a question of the control socket."""

_LENGTH_BYTES = 4


class LinkError(Exception):
    """There is no link, or it cannot go on; the text says why and what to do."""


class LinkArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `fleet-link`.

    Attributes:
        node: name of the node in the fleet.
        labels: of the node, which children may need.
        version: of these messages, as the actor has it.
        ray: of the node.
    """

    node: str
    labels: tuple[str, ...] = ()
    version: str = VERSION
    ray: RayPlace | None = None


class LinkAnswer(msgspec.Struct, frozen=True):
    """Result of `fleet-link`; frames follow.

    Attributes:
        version: of these messages, as the daemon has it.
        ledger: id of the node's ledger.
        capacity: children that the daemon takes.
    """

    version: str
    ledger: str
    capacity: int


class LeaveArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `fleet-leave`: none."""


class LeaveAnswer(msgspec.Struct, frozen=True):
    """Result of `fleet-leave`: nothing of the fleet runs here any more.

    Attributes:
        node: that has left; None if the daemon was no node.
    """

    node: str | None


class _Question(msgspec.Struct, frozen=True):
    v: int
    do: str
    args: LinkArgs


class _Reply(msgspec.Struct, frozen=True):
    ok: bool
    result: LinkAnswer | None = None
    error: str | None = None


def check_link(args: LinkArgs, *, linked: str | None) -> None:
    """Refuse a link that a daemon with `[fleet]` cannot have.

    Args:
        args: of the request.
        linked: the node whose link is open.

    Raises:
        LinkError: it is refused.
    """
    _check_version(args)
    if not args.node:
        raise LinkError("cannot link a node: its name is empty; name it by --node")
    if linked is not None:
        raise LinkError(
            f"cannot link node {args.node!r}: this daemon is linked as node"
            f" {linked!r} already; end that node actor first"
        )


def refuse_link(args: LinkArgs) -> NoReturn:
    """Refuse every link, since the daemon has no `[fleet]`.

    Raises:
        LinkError: it is refused.
    """
    _check_version(args)
    raise LinkError(
        f"cannot link node {args.node!r}: this daemon's configuration has no"
        " [fleet]; add it and start the daemon again"
    )


def _check_version(args: LinkArgs) -> None:
    if args.version != VERSION:
        raise LinkError(
            f"cannot link node {args.node!r}: the node actor's version is"
            f" {args.version!r}, the daemon's is {VERSION!r}; install one version"
            " everywhere"
        )


def request_line(args: LinkArgs, control_version: int) -> bytes:
    """Return the request, for the control socket of such a version."""
    return msgspec.json.encode(_Question(control_version, REQUEST, args)) + b"\n"


def encode_frame(message: Message) -> bytes:
    """Return a message as a frame.

    Raises:
        LinkError: it is too long.
    """
    data = encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise LinkError(
            f"cannot send a {type(message).__name__} of {len(data)} bytes: a frame has"
            f" at most {MAX_FRAME_BYTES}"
        )
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


M = TypeVar("M")


class FrameReader(Generic[M]):
    """Messages out of bytes, however these are cut.

    Args:
        decode: returns the message of one frame: `decode_from_node`, or
            `decode_from_directory`.
    """

    def __init__(self, decode: Callable[[bytes], M]) -> None:
        self._decode = decode
        self._pending = bytearray()
        self._fault: str | None = None

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that are whole by now.

        Raises:
            LinkError: the other end does not keep to the form; messages before the
                fault are lost with it, as with a link that was cut.
        """
        self._check()
        self._pending += data
        messages = []
        while (frame := self._next_frame()) is not None:
            try:
                messages.append(self._decode(frame))
            except msgspec.DecodeError as why:
                self._fail(f"cannot read a frame: {why}")
        return messages

    def _next_frame(self) -> bytes | None:
        pending = self._pending
        if len(pending) < _LENGTH_BYTES:
            return None
        size_bytes = int.from_bytes(pending[:_LENGTH_BYTES], "big")
        if not 0 < size_bytes <= MAX_FRAME_BYTES:
            self._fail(
                f"cannot read a frame of {size_bytes} bytes: it has 1 to"
                f" {MAX_FRAME_BYTES}"
            )
        end = _LENGTH_BYTES + size_bytes
        if len(pending) < end:
            return None
        frame = bytes(pending[_LENGTH_BYTES:end])
        del pending[:end]
        return frame

    def _fail(self, text: str) -> None:
        self._fault = f"{text}; close the link and open another"
        self._pending.clear()
        self._check()

    def _check(self) -> None:
        if self._fault is not None:
            raise LinkError(self._fault)


class ActorReader:
    """The actor's input from its link: the answer, then messages of the node.

    Attributes:
        answer: None until it has come.
    """

    def __init__(self) -> None:
        self.answer: LinkAnswer | None = None
        self._line = bytearray()
        self._frames: FrameReader[FromNode] = FrameReader(decode_from_node)

    def feed(self, data: bytes) -> list[FromNode]:
        """Return the messages that are whole by now; `answer` is set before the first.

        Raises:
            LinkError: the daemon refuses the link, or does not keep to the form.
        """
        if self.answer is not None:
            return self._frames.feed(data)
        self._line += data
        line, newline, rest = bytes(self._line).partition(b"\n")
        if len(line) > MAX_ANSWER_BYTES:
            raise LinkError(
                f"cannot read the daemon's answer: it has more than {MAX_ANSWER_BYTES}"
                " bytes; is that socket sandhost's?"
            )
        if not newline:
            return []
        self.answer = _read_answer(line)
        self._line.clear()
        return self._frames.feed(rest)


def _read_answer(line: bytes) -> LinkAnswer:
    """Return the daemon's answer; spaces before it are heart-beats.

    Raises:
        LinkError: it is a refusal, or no answer.
    """
    try:
        reply = msgspec.json.decode(line, type=_Reply)
    except msgspec.DecodeError as why:
        raise LinkError(f"cannot read the daemon's answer: {why}") from None
    if not reply.ok or reply.result is None:
        raise LinkError(reply.error or "cannot link: the daemon gives no reason")
    return reply.result
