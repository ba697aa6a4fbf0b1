"""The command ``sandhost``: chooses the imports, on which its start time depends.

``fs`` and ``llm`` run inside a child, often in a loop of a shell script: no framework,
no Trio. Commands that spawn children start their launchpad first, so that it is ready
when the heavy imports are done.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.spawn.launchpad.start import LaunchpadProcess

SPAWNING = frozenset({"run", "pipeline", "relay", "serve"})
"""Commands that start children of their own."""


STOPPED_WITH_STATUS = frozenset({"run", "pipeline", "relay"})
"""Commands whose status says by which signal they were stopped (face), at any time."""

LIGHT = frozenset({"fs", "fd", "llm", "handover-check", "serve-commands"})
"""Commands without the framework: inside a child, often in a loop of a shell script, and
what a host asks its next program; a child of a fleet that runs commands."""


def main() -> None:
    """Run one command and exit with its status."""
    # Objects of imports stay: collecting among them costs a tenth of the start.
    gc.disable()
    try:
        status = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    except Exception as why:
        if os.environ.get("SANDHOST_TRACEBACK"):
            raise
        text = f"internal error: {type(why).__name__}: {why}"
        hint = "; set SANDHOST_TRACEBACK=1 for a report"
        if _is_for_want_of_memory(why):
            text = "there is too little memory for it"
            hint = "; raise the limit memory, or ulimit -v, to 100M at least"
        _print_stderr("sandhost", " ".join((text + hint).split()))
        status = 125
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            status = status or 1
    # Everything that has an end has had it; taking modules apart is 20 ms of nothing.
    os._exit(status)


def _is_for_want_of_memory(why: Exception) -> bool:
    # The text of dlopen(3) for a failed mmap(2); there is no errno.
    unmapped = isinstance(why, ImportError) and "failed to map segment" in str(why)
    return unmapped or isinstance(why, MemoryError)


def run_command(words: list[str]) -> int:
    """Run a command by its words; return its exit status."""
    # Another distribution, supervisord, installs an import package of the same name.
    beside = __file__.rpartition("/")[0] + "/supervisorctl.py"
    if os.access(beside, os.F_OK):
        text = "supervisord is installed in the same environment and shares the package"
        hint = "install sandhost into an environment of its own"
        _print_stderr("sandhost", f"{text} 'supervisor'; {hint}")
        return 125
    if words and words[0] in LIGHT:
        return _load_command(words[0])(words[1:])
    if words and words[0] in STOPPED_WITH_STATUS:
        _be_stopped_with_status()
    if words and words[0] == "serve":
        _choose_log_form(words)
    launchpad = None
    spawns = bool(words) and (words[0] in SPAWNING or _is_agents(words))
    if spawns and not {"-h", "--help"} & set(words[1:2]):
        if words[0] == "relay" and not _has_door():
            text = "not inside a child: FD 3 is not open; start it with sandhost run"
            _print_stderr("sandhost relay", text)
            return 125
        from supervisor.spawn.launchpad.start import start_launchpad  # noqa: PLC0415

        try:
            _close_up()
            launchpad = _inherited(words[0]) or start_launchpad()
        except OSError as why:
            from hostlib.messages import remedy  # noqa: PLC0415 - only what fails needs it

            what = "" if why.filename is None else f"{why.filename!r}: "
            how = remedy(why) or "; sandhost doctor says what this machine lacks"
            text = f"cannot start the launchpad: {what}{why.strerror}{how}"
            _print_stderr(f"sandhost {words[0]}", text)
            return 125
    from supervisor.cli.app import run_cli  # noqa: PLC0415 - after the launchpad

    return run_cli(words, launchpad)


def _is_agents(words: list[str]) -> bool:
    """Return whether this is the MCP server that runs an agent's commands."""
    return words[0] == "mcp" and "--files" in words


def _be_stopped_with_status() -> None:
    """End with a signal's status until a host handles it: there is nothing to stop.

    A manager's stop of a service is no failure at any time: that is ``serve``.
    """
    # `signal` imports `enum`, which a host needs anyhow, but not before its launchpad.
    import _signal  # type: ignore[import-not-found] # noqa: PLC0415 - for those alone

    for number in (_signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT):
        if _signal.getsignal(number) == _signal.SIG_DFL:
            _signal.signal(number, lambda number, _frame: os._exit(128 + number))


def _choose_log_form(words: list[str]) -> None:
    """Choose the form of messages of a daemon that has no log yet.

    The configuration, which may name its form, is not read yet.
    """
    from hostlib.messages import set_json_log  # noqa: PLC0415 - for a daemon only

    told = " ".join(words).replace("=", " ").partition("--log-format ")[2][:4]
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    set_json_log(as_json=told == "json" or (told != "text" and not is_terminal))


def _print_stderr(title: str, text: str) -> None:
    from hostlib.messages import print_stderr  # noqa: PLC0415 - only what fails needs it

    print_stderr(title, text)


def _load_command(word: str) -> Callable[[list[str]], int]:
    """Return the main function of a command without a launchpad."""
    if word == "fs":
        from vfs.client.shell.fs import main  # noqa: PLC0415 - only the one that is called
    elif word == "fd":
        from vfs.client.shell.fd import main  # noqa: PLC0415
    elif word == "handover-check":
        from supervisor.daemon.handover_check import check as main  # noqa: PLC0415
    elif word == "serve-commands":
        from supervisor.cluster.command_server import main  # noqa: PLC0415
    else:
        from vfs.client.shell.llm import main  # noqa: PLC0415
    return main


def _close_up() -> None:
    """Keep other processes from reading this one's memory, and write no core file.

    A host holds keys; its children may be of its own user, and in no sandbox.
    """
    import resource  # noqa: PLC0415 - for hosts only

    from hostlib.linux.syscalls import PR_SET_DUMPABLE, prctl  # noqa: PLC0415

    try:
        prctl(PR_SET_DUMPABLE, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    except OSError as why:
        reason = f"the host may not rule out core files of itself: {why.strerror}"
        raise OSError(why.errno, reason) from why


def _inherited(word: str) -> LaunchpadProcess | None:
    """Return the launchpad that the program before handed over; None without one."""
    if word != "serve" or "SANDHOST_HANDOVER" not in os.environ:
        return None
    from supervisor.handover.next_program import take_inherited  # noqa: PLC0415 - once in a while

    return take_inherited()


def _has_door() -> bool:
    """Return whether this process has a child's door: its descriptors or its socket.

    Called before this process opens descriptors. The socket is tried later.
    """
    if os.environ.get("FSPROXY_SOCKET"):
        return True
    try:
        for number in os.environ.get("FSPROXY_FD", "3").split(","):
            os.fstat(int(number))
    except (OSError, ValueError, OverflowError):
        return False
    return True


if __name__ == "__main__":
    main()
