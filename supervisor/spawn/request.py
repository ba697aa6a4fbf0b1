"""The request for a child, and the reason why it could not start.

The request as the host words it, its checks, its form on the wire, the search for its
program, and the error with the exit status it stands for.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostlib.messages import USED_UP, printable
from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.words import JOINS, LOCKS, SENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from supervisor.spawn.inner_pair import InnerListener, InnerMounts

# environ(7) has no default; this is what execvp(3) searches without PATH.
DEFAULT_PATH = "/bin:/usr/bin"


class SpawnError(Exception):
    """A child could not be started, and nothing is left of it.

    Attributes:
        errno: The error of the failing step.
        stage: "lookup", "request", "fork", a step of `launchpad.child.STEPS`, or
            "pidfd" if this process may open no more descriptors.
        text: One line: what, to what, why.
        reason: The last part of that, in the kernel's words.
        missing: The path that the program needs and does not find; "" for none.
    """

    missing = ""

    def __init__(self, number: int, stage: str, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.errno = number
        self.stage = stage
        self.text = text
        self.reason = reason

    @property
    def exit_status(self) -> int:
        """The exit status of `run`: 127 not found, 126 not executable, 125 refused."""
        if self.stage not in {"lookup", "exec"}:
            return 125
        return 127 if self.errno in {errno.ENOENT, errno.ENOTDIR} else 126


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """The request for a child. Text that came from bytes is surrogateescaped.

    Attributes:
        executable: An absolute path, as `find_executable` gives it.
        argv: The arguments of the program, its own name first.
        env: All of its environment.
        cwd_fd: Its working directory; the caller's to close.
        fds: (source, number in the child): it has these open and no others. The
            sources are the caller's to close, once `Launcher.spawn` is over.
        rlimits: (resource, soft, hard) as for setrlimit(2), -1 is no limit.
        umask: None for the host's.
        layers: Arguments of each sandbox layer, by its name
            (``launchpad.child.STEPS``).
        listener: Listeners of the host in its net namespace; takes netns.
        mounts: Mounts of the host's that `layers` names in "mountns"; the caller's.
        locks: Descriptors that the launchpad keeps open as long as it or a leftover of
            it lives, also if this host ends; the caller's.
        joined: Namespaces by name of the child whose tool it is, where the words of
            "userns", "netns" or a mount say so; the caller's.
        sends: The way of the mounts that it makes itself; None if the host wants none.
    """

    executable: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd_fd: int
    fds: tuple[tuple[int, int], ...]
    rlimits: tuple[tuple[int, int, int], ...] = ()
    umask: int | None = None
    layers: Mapping[str, object] = field(default_factory=dict)
    listener: InnerListener | None = None
    mounts: tuple[int, ...] = ()
    sends: InnerMounts | None = None
    locks: tuple[int, ...] = ()
    joined: Mapping[str, int] = field(default_factory=dict)

    def body(self) -> tuple[object, ...]:
        """Return the request as a SPAWN message without kind and id; see `sources`.

        Raises:
            SpawnError: Stage "request": no process could be what is asked for.
        """
        for fault in (*_faults_of_program(self), *_faults_of_env(self.env)):
            raise self._refusal(errno.EINVAL, fault)
        try:
            executable = os.fsencode(self.executable)
            argv = tuple(map(os.fsencode, self.argv))
            env = {os.fsencode(k): os.fsencode(v) for k, v in self.env.items()}
        except UnicodeEncodeError as error:
            fault = f"{_shown(error.object)!r} stands for no bytes"
            raise self._refusal(errno.EINVAL, fault) from None
        size_bytes = sum(map(len, (*argv, *env, *env.values())))
        if size_bytes > wire.TEXT_BYTES:
            fault = f"{size_bytes} bytes of arguments and environment are too many"
            raise self._refusal(errno.E2BIG, fault)
        return (
            executable,
            argv,
            env,
            tuple(int(target) for _, target in self.fds),
            tuple(tuple(map(int, limit)) for limit in self.rlimits),
            self.umask,
            self._layers(),
        )

    def _layers(self) -> dict[str, object]:
        more: dict[str, object] = {}
        if self.listener is not None:
            more["listener"] = self.listener.order()
        if self.sends is not None:
            more[SENT] = ()
        if self.locks:
            more[LOCKS] = len(self.locks)
        if self.joined:
            more[JOINS] = tuple(self.joined)
        return {**self.layers, **more}

    @property
    def sources(self) -> tuple[int, ...]:
        """The descriptors that travel with the message, in its order."""
        way = () if self.listener is None else (self.listener.way,)
        sources = (source for source, _ in self.fds)
        if self.sends is not None:
            way = (self.sends.way, *way)
        mounts = (*self.mounts, *self.joined.values())
        return (self.cwd_fd, *self.locks, *sources, *mounts, *way)

    def error(self, number: int, stage: str, detail: bytes) -> SpawnError:
        """Return the launchpad's FAILED message as an exception with a text."""
        name = _shown(self.executable)
        reason = os.strerror(number)
        shown = _shown(os.fsdecode(detail))
        if stage == "exec":
            if detail:
                reason = f"it is there, but {shown} is not: {reason}"
            error = SpawnError(
                number, stage, f"cannot start '{name}': {reason}", reason
            )
            if number == errno.ENOENT:
                error.missing = os.fsdecode(detail) or self.executable
            return error
        reason, rest = _name_step(stage, number, shown)
        text = f"cannot start '{name}': {reason}{rest}"
        return SpawnError(number, stage, text, reason)

    def gone(self) -> SpawnError:
        """Return the loss of a launchpad that the host outlives, as an exception."""
        return self._refusal(errno.ECANCELED, "the launchpad has ended")

    def _refusal(self, number: int, fault: str) -> SpawnError:
        text = f"cannot start '{_shown(self.executable)}': {fault}"
        return SpawnError(number, "request", text)


def _faults_of_program(request: SpawnRequest) -> Iterator[str]:
    if not request.executable.startswith("/"):
        yield "its path is not absolute"
    if "\0" in request.executable:
        yield "its path holds a NUL byte"
    if not request.argv:
        yield "its argument list is empty"
    for position, argument in enumerate(request.argv):
        if "\0" in argument:
            yield f"argument {position} holds a NUL byte"
    targets = [target for _, target in request.fds]
    if len(set(targets)) < len(targets) or min(targets, default=0) < 0:
        yield f"descriptor numbers {targets} are not distinct"
    if len(targets) > wire.TARGETS:
        yield f"more than {wire.TARGETS} descriptors"


def _faults_of_env(env: Mapping[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if "\0" in name + value:
            yield f"environment variable '{_shown(name)}' holds a NUL byte"
        if not name or "=" in name:
            yield f"environment variable '{_shown(name)}' has no possible name"


def find_executable(
    name: str,
    path_env: str | None,
    cwd: str,
    shown: Callable[[str], str] = lambda path: path,
) -> str:
    """Return the path of the program that execvp(3) would start in `cwd` for `name`.

    A name with a slash is a path; any other is looked for in each directory of
    `path_env`, where an empty entry is `cwd`. The path may change before the exec, which decides.

    Args:
        name: As the user typed it.
        path_env: PATH of the child; `DEFAULT_PATH` if None.
        cwd: Absolute working directory of the child.
        shown: Returns where this host can look at what the child has at a path.

    Returns:
        An absolute path of a file that this user may execute.

    Raises:
        SpawnError: Stage "lookup": ENOENT, ENOTDIR (127); EACCES, EISDIR (126).
    """
    if not name:
        raise SpawnError(errno.ENOENT, "lookup", "cannot start '': no command is named")
    if "\0" in name:
        text = f"cannot start '{_shown(name)}': its name holds a NUL byte"
        raise SpawnError(errno.ENOENT, "lookup", text)
    if "/" in name:
        candidates = [name]
    else:
        path = DEFAULT_PATH if path_env is None else path_env
        candidates = [f"{entry or '.'}/{name}" for entry in path.split(":")]
    worst = errno.ENOENT
    for candidate in candidates:
        # Joined as they are: dropping "x/.." is wrong where x is a symbolic link.
        found = candidate if candidate.startswith("/") else f"{cwd}/{candidate}"
        fault = _fault_of_program(shown(found))
        if fault is None:
            return found
        # As the shell: "found but not to be executed" tells more than "not found".
        if fault in {errno.EACCES, errno.EISDIR} or len(candidates) == 1:
            worst = fault
    reason = os.strerror(worst)
    if worst == errno.ENOENT and "/" not in name:
        reason += " in any directory of PATH; install it, or name it by its path"
    else:
        reason += _TO_DO.get(worst, "")
    raise SpawnError(worst, "lookup", f"cannot start '{_shown(name)}': {reason}")


_REPLACED = (
    "its working directory was replaced by something else meanwhile",
    "; put the directory back",
)

_OF_STEPS = {
    ("cwd", errno.ESTALE): _REPLACED,
    ("cwd", errno.ELOOP): _REPLACED,
    ("cwd", errno.ENOTDIR): _REPLACED,
    ("cwd", errno.ENOENT): _REPLACED,
    ("cwd", errno.EACCES): (
        "its working directory may not be entered",
        "; change to another one",
    ),
    ("mountns", errno.ESTALE): (
        "{}, which is to be hidden from it, was moved meanwhile",
        "; put it back",
    ),
    ("workspace", errno.ESTALE): (
        "{} was replaced by something else meanwhile",
        "; put it back",
    ),
    ("userxattr", errno.EOPNOTSUPP): (
        "the kernel made the overlay of {} without 'userxattr'",
        "; use the mode 'direct', or a host that is root",
    ),
}
"""Reasons for which steps fail, by step and errno, each with the remedy."""

_TO_DO = {
    errno.ENOENT: "; check its path",
    errno.ENOTDIR: "; check its path",
    errno.EACCES: "; make it executable (chmod +x), or start what runs it",
    errno.EISDIR: "; name a program",
}
"""The remedy where a program cannot be executed."""


def _name_step(stage: str, number: int, shown: str) -> tuple[str, str]:
    """Return why a step failed, and the end of the text: the remedy and the step.

    Args:
        stage: the step.
        number: errno.
        shown: the object that it is about, if there is one.
    """
    if (stage, number) in _OF_STEPS:
        reason, how = _OF_STEPS[stage, number]
        return reason.format(shown), how
    reason, how = os.strerror(number), USED_UP.get(number, "")
    if stage == "landlock" and number == errno.E2BIG:
        reason = "the kernel stacks 16 layers of Landlock, and they are used up"
        how = "; nest fewer children, or run the outermost with --sandbox none"
    elif shown:
        reason = f"{shown}: {reason}"
    elif number == errno.ENOSPC:
        from hostlib.linux.namespace_counts import explain_refusal  # noqa: PLC0415 - seldom

        why, to_do = explain_refusal(stage)
        reason, how = why or reason, f"; {to_do}" if why else ""
    return reason, f"{how} (at '{stage}')"


def _fault_of_program(path: str) -> int | None:
    """Return the errno of executing `path` as this user; None if it is a program."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - on the way of every start
    except OSError as error:
        return error.errno or errno.EIO
    if stat.S_ISDIR(mode):
        return errno.EISDIR
    if not stat.S_ISREG(mode) or not os.access(path, os.X_OK, effective_ids=True):
        return errno.EACCES
    return None


def _shown(text: str) -> str:
    """Return a name for one line: short, without control bytes and lone surrogates."""
    return printable(text[:200])
