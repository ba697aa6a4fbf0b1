"""The steps of a forked child between fork and exec, and the report of a failure.

1. `STEPS` is the order: layers that need privileges come before "rlimit", those that take
   rights away after it. A failed layer ends the child: the report lists all layers.
2. Exactly the named descriptors are open after the exec.
3. Limits come late, so that they bind the program and not these steps.
4. Signals have their defaults after exec (execve(2)); only SIGCHLD is blocked before.
5. It ends in exec or `os._exit`, and never returns into the launchpad's loop.
6. A child that waits for its order (``launchpad.prefork``) holds nothing of the
   launchpad's.
"""

from __future__ import annotations

# `signal` imports `enum`: 4 ms of a start that takes 9.
import _signal  # type: ignore[import-not-found]
import errno
import fcntl
import os
import resource

from hostlib.linux.syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    close_at_exec,
    open_exactly,
    prctl,
    set_name,
)
from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.layers import (
    common_root,
    landlock,
    loopback,
    mounts,
    namespaces,
    privileges,
)
from supervisor.spawn.launchpad.layers.fresh_root import PartError
from supervisor.spawn.launchpad.order import (
    APPLIED,
    BECAME,
    DETAIL_BYTES,
    FORKING,
    GAVE_UP,
    GROUP_TO_FORK_INTO,
    frame,
)
from supervisor.spawn.launchpad.words import (
    JOINED,
    NET,
    NO_LAYERS,
    OVERLAY,
    USERS,
    VIEW,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from supervisor.spawn.launchpad.order import Order

# The exit status of a child that never became its program; the report says why.
FAILED_STATUS = 127

_STOCK_NAME = b"sandhost-stock"

# By so many descriptors a child has fewer: more than a message for each processor holds.
HOSTS_MORE = 1024


def become(order: Order, launchpad: int, report: int) -> NoReturn:
    """Turn this forked process into what `order` says.

    Args:
        order: Its descriptors are those the launchpad received; or it is still to come
            by its line, and is waited for when everything is ready that needs no order.
        launchpad: The pid of the process that forked.
        report: Where `reports` are written. It closes by the exec: end of file without
            a failure is success.
    """
    stage, number, detail = "fork", errno.ECANCELED, b""
    order.report = report
    try:
        for stage, step in STEPS:  # noqa: B007 - read below when a step fails
            step(order, launchpad)
    except PartError as error:
        stage, number, detail = error.args
    except OSError as error:
        number = error.errno or errno.EIO
        if stage == "exec":
            detail = _missing_interpreter(order.executable, number)
    except ValueError:  # resource.prlimit: soft limit above the hard one
        number = errno.EINVAL
    except MemoryError:
        number = errno.ENOMEM
    finally:
        # Also after an unexpected exception: a second launchpad must never run on.
        try:
            _tell(order, GAVE_UP, number, stage, detail[:DETAIL_BYTES])
        finally:
            os._exit(FAILED_STATUS)


def _missing_interpreter(executable: bytes, number: int) -> bytes:
    """Return the path that execve(2) did not find beside an existing file, or b"".

    ENOENT names the file, the interpreter of its "#!" line or the loader of an ELF
    program alike. Asked in the forked child, where one may block.
    """
    if number != errno.ENOENT:
        return b""
    try:
        # The file there may be a FIFO now: its child may have put it there.
        fd = os.open(executable, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        start = os.read(fd, 256).partition(b"\n")[0]
    except OSError:
        return b""
    finally:
        os.close(fd)
    words = start[2:].split() if start.startswith(b"#!") else []
    return words[0] if words else b"its loader"


def _tell(order: Order, *message: Any) -> None:
    os.write(order.report, frame(*message))


def _keep_to_itself(order: Order, _launchpad: int) -> None:
    """Let go of all that is the launchpad's, where an order has to be waited for."""
    if order.line is None:
        return
    # If the launchpad dies: at once, and by its closed line in a namespace of pids.
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    keep = sorted({*range(3), order.line.fileno(), order.report, order.group} - {-1})
    last = os.sysconf("SC_OPEN_MAX")
    for kept, following in zip(keep, [*keep[1:], last], strict=True):
        os.closerange(kept + 1, following)
    set_name(_STOCK_NAME)


def _unblock_signals(_order: Order, _launchpad: int) -> None:
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _prepare_rules(order: Order, _launchpad: int) -> None:
    if order.likely_rules is None:
        return
    rules, no_tcp = order.likely_rules
    try:
        order.ruleset = landlock.prepare(rules, no_tcp=no_tcp)
    except OSError:
        # The order that is to come may not ask for them; if it does, it fails by itself.
        return


def _prepare_root(order: Order, _launchpad: int) -> None:
    if order.likely_root is not None:
        namespaces.enter("mountns")
        order.root = common_root.make_common_root(*order.likely_root)


def _await_order(order: Order, _launchpad: int) -> None:
    """Take in the order, if it is not here; move descriptors out of its way."""
    if order.group >= 0:  # it has been forked into that, or never will be
        os.close(order.group)
        order.group = -1
    if order.line is not None:
        received = wire.wait_for_message(order.line)
        if received is None:  # not wanted any more, or the launchpad is gone
            os._exit(0)
        (body, has_owners), fds = received
        if has_owners:
            order.owners = fds.pop()
        order.fill(body, fds)
    free = max(order.targets, default=-1) + 1

    def move(fd: int) -> int:
        if fd < 0 or fd >= free:
            return fd
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free)

    # Above every target number, so that none is written over before it is in its place;
    # what a listener goes by is closed when descriptors are put into theirs.
    order.cwd_fd = move(order.cwd_fd)
    order.sources = [move(fd) for fd in order.sources]
    order.report = move(order.report)
    order.owners = move(order.owners)
    if order.ruleset is not None:
        order.ruleset.fd = move(order.ruleset.fd)


def _layer(
    name: str, apply: Callable[[Order, Any], str]
) -> tuple[str, Callable[[Order, int], None]]:
    """Return a row of `STEPS` that does nothing unless the order asks for it."""

    def step(order: Order, _launchpad: int) -> None:
        if name in order.layers:
            order.applied.append((name, apply(order, order.layers[name])))

    return name, step


def _enter_user(order: Order, who: tuple[int, int] | str) -> str:
    if who == JOINED:
        return namespaces.join_user(order.joined[USERS])
    return namespaces.enter_user(*who)


def _namespace(name: str) -> tuple[str, Callable[[Order, int], None]]:
    return _layer(name, lambda _order, _nothing: namespaces.enter(name))


def _enter_net(order: Order, _launchpad: int) -> None:
    """Enter a fresh net namespace, which needs no order."""
    if order.layers.get("netns", JOINED) != JOINED:
        order.applied.append(("netns", namespaces.enter("netns")))


def _join_net(order: Order, _launchpad: int) -> None:
    """Enter a child's, which comes with the order."""
    if order.layers.get("netns") == JOINED:
        order.applied.append(("netns", namespaces.join_net(order.joined[NET])))


def _enter_pids(order: Order, _nothing: None) -> str:
    if order.init >= 0:
        return "own"
    said = namespaces.enter("pidns")
    _tell(order, FORKING)  # or the launchpad takes them for leftovers
    child, init, order.is_in_group = namespaces.fork_into(order.group)
    if child != 0:
        _tell(order, BECAME, child, init)
        os._exit(0)
    return said


def _listen(order: Order, wanted: loopback.LoopbackOrder) -> str:
    return loopback.furnish(wanted, order.listener_fd)


def _lead_a_session(order: Order, _launchpad: int) -> None:
    os.setsid()
    order.applied.append(("session", "own"))


def _adopt_orphans(_order: Order, _launchpad: int) -> None:
    # Kept over exec, not inherited by fork: the child's daemons stay beneath it.
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with_the_launchpad(order: Order, launchpad: int) -> None:
    # After the user has changed, which would undo it.
    prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    # In a pid namespace the launchpad has no number: if it died before the line above
    # took effect, the host, which then ends all beneath it, ends this too.
    if "pidns" not in order.layers and os.getppid() != launchpad:
        os._exit(FAILED_STATUS)


def _join_groups(order: Order, groups: tuple[tuple[bytes, bytes], ...]) -> str:
    for directory, name in groups:
        if name == GROUP_TO_FORK_INTO and order.is_in_group:
            continue
        fd = os.open(directory + b"/" + name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)
    return ", ".join(os.fsdecode(directory) for directory, _ in groups)


def _change_root(order: Order, view: tuple[Any, ...]) -> str:
    links, trees, order.cwd, files, command = view
    order.is_in_overlay = any(
        kind == OVERLAY and (order.cwd + b"/").startswith(path + b"/")
        for path, kind, _ in trees
    )
    if order.root is None:
        namespaces.enter("mountns")
    fresh_proc = "pidns" in order.layers
    made = mounts.RootEntries(links, files, command)
    joined = order.joined.get(VIEW, -1)
    passed = mounts.PassedDescriptors(order.held, order.mounts_fd, joined)
    return mounts.build(
        made, trees, order.owners, passed, order.root, fresh_proc=fresh_proc
    )


def _enter_directory(order: Order, _launchpad: int) -> None:
    """Enter the working directory; after a fresh root was made, the copy in there.

    The directory of before is outside: a process that stays in it can walk out of the
    root. The child may have put a link under its name: one to ``/proc/1/root`` leads a
    process of root's out again. So no link is followed, and the directory must be the
    very one that the host holds.
    """
    if order.cwd:
        inside = open_exactly(order.cwd)
        is_it = os.path.samestat(os.fstat(inside), os.fstat(order.cwd_fd))
        is_made = order.is_in_overlay or mounts.is_made_here(order.cwd)
        if not (is_it or is_made):
            raise OSError(errno.ESTALE, "another directory")
        os.close(order.cwd_fd)
        order.cwd_fd = inside
    os.fchdir(order.cwd_fd)


def _set_umask(order: Order, _launchpad: int) -> None:
    if order.umask is not None:
        os.umask(order.umask)


def _place_descriptors(order: Order, _launchpad: int) -> None:
    close_at_exec(0)
    for source, target in zip(order.sources, order.targets, strict=True):
        os.dup2(source, target, inheritable=True)


def _limit_resources(order: Order, _launchpad: int) -> None:
    limits = order.rlimits
    if "rlimits" in order.layers:
        limits = (_fewer_descriptors(), *limits)
    for which, soft, hard in limits:
        # Not setrlimit: it turns EPERM into a ValueError.
        resource.prlimit(0, which, (soft, hard))
    if "rlimits" in order.layers:
        order.applied.append(("rlimits", f"{len(limits)} set"))


def _fewer_descriptors() -> tuple[int, int, int]:
    """Return a limit of descriptors that is less than the host's.

    The kernel counts descriptors in flight over unix sockets by user, and a sender
    compares that with a limit of its own (unix(7), ETOOMANYREFS): a child of its host's
    user that had as many could stuff its own sockets until the host can send no
    descriptor to any child.
    """
    soft, hard = resource.prlimit(0, resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:  # Linux knows none; others that play it may
        hard = 1 << 20
    hard -= min(HOSTS_MORE, hard // 4)
    return resource.RLIMIT_NOFILE, min(soft, hard), hard


def _forbid_new_privileges(_order: Order, _nothing: None) -> str:
    return privileges.forbid_new_privileges()


def _restrict_files(order: Order, rules: tuple[Any, bool]) -> str:
    paths, no_tcp = rules
    return landlock.apply(paths, no_tcp=no_tcp, ready=order.ruleset)


def _drop_bounding_set(order: Order, _launchpad: int) -> None:
    if "capabilities" in order.layers:
        order.is_bounded = privileges.drop_bounding_set()


def _become_user(_order: Order, uid: int) -> str:
    return privileges.become_user(uid)


def _drop_capabilities(order: Order, _nothing: None) -> str:
    privileges.drop_capabilities()
    return "none left" if order.is_bounded else "none left but in the bounding set"


def _filter_calls(_order: Order, code: bytes) -> str:
    return privileges.install_filter(code)


def _report(order: Order, _launchpad: int) -> None:
    for name in order.layers.keys() - NO_LAYERS - dict(order.applied).keys():
        # No step has put it on: no program runs without a wall that was asked for.
        raise PartError(name, errno.EBADMSG, b"")
    order.applied.append(("descriptors", f"exactly {sorted(order.targets)}"))
    _tell(order, APPLIED, tuple(order.applied))


def _execute(order: Order, _launchpad: int) -> None:
    os.execve(order.executable, order.argv, order.env)


# Before the row "order" stands what every order of one shape says (`SHAPING`).
STEPS: tuple[tuple[str, Callable[[Order, int], None]], ...] = (
    ("fork", _keep_to_itself),
    ("signals", _unblock_signals),
    _layer("userns", _enter_user),
    ("netns", _enter_net),
    _namespace("ipcns"),
    _namespace("utsns"),
    _layer("pidns", _enter_pids),
    ("session", _lead_a_session),
    ("subreaper", _adopt_orphans),
    _layer("cgroup", _join_groups),
    _layer("no_new_privs", _forbid_new_privileges),
    ("bounding", _drop_bounding_set),
    ("landlock", _prepare_rules),
    ("mountns", _prepare_root),
    ("order", _await_order),
    ("netns", _join_net),
    # No wall: the host's listeners in the fresh net namespace.
    _layer("listener", _listen),
    _layer("mountns", _change_root),
    ("cwd", _enter_directory),
    ("umask", _set_umask),
    ("descriptors", _place_descriptors),
    _layer("landlock", _restrict_files),
    ("rlimit", _limit_resources),
    _layer("uid", _become_user),
    _layer("capabilities", _drop_capabilities),
    ("pdeathsig", _die_with_the_launchpad),
    _layer("seccomp", _filter_calls),
    ("report", _report),
    ("exec", _execute),
)

SHAPING = (
    "mountns",
    "userns",
    "netns",
    "ipcns",
    "utsns",
    "pidns",
    "cgroup",
    "no_new_privs",
    "capabilities",
)
"""The layers whose words are the shape of an order: they are put on before it comes.

Of "mountns" that is a namespace; of "cgroup", that there are groups.
"""
