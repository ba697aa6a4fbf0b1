"""The layers that this machine gives a host: each one tried, no list of versions.

Rules of this file.

1. A probe tries the thing itself, and undoes it. A layer that was not tried is
   "unknown".
2. Each row says what was tried and what a host does without it.
3. The layers of a child are tried with a child (``cli.doctor_layers``); the rows on
   layers here say what the kernel has, for any user.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.sandbox import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

PRESENT = "present"
MISSING = "missing"
UNKNOWN = "unknown"

_LAYER = "children run without the layer; see the table below"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report.

    Attributes:
        what: the thing.
        state: ``present``, ``missing`` or ``unknown``.
        detail: which version, which limit, why not.
        probed: the call that was tried.
        without: the host's substitute where it is missing.
        is_needed: no host works without it.
    """

    what: str
    state: str
    detail: str
    probed: str
    without: str
    is_needed: bool = False

    def row(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "what": self.what,
            "state": self.state,
            "detail": self.detail,
            "probed": self.probed,
            "without": self.without,
            "needed": self.is_needed,
        }


@dataclass(frozen=True, slots=True)
class _Probe:
    what: str
    attempt: Callable[[], str]
    probed: str
    without: str
    is_needed: bool = False


def probe_machine() -> tuple[Finding, ...]:
    """Try everything; takes some 50 ms, changes nothing."""
    return tuple(try_probe(probe) for probe in PROBES)


def try_probe(probe: _Probe) -> Finding:
    """Return the finding of one probe, tried here."""
    try:
        state, detail = PRESENT, probe.attempt()
    except attempts.UnknownError as why:
        state, detail = UNKNOWN, str(why)
    except attempts.MissingError as why:
        state, detail = MISSING, str(why)
    except OSError as why:
        state, detail = MISSING, why.strerror or str(why)
    return Finding(
        probe.what, state, detail, probe.probed, probe.without, probe.is_needed
    )


PROBES = (
    _Probe(
        "Linux", attempts.linux, "uname(2)", "no host: it cannot wait by pidfd", True
    ),
    _Probe("pidfds", attempts.pidfd, "pidfd_open(2) of itself", "no host", True),
    _Probe(
        "child subreaper",
        attempts.subreaper,
        "prctl(2) PR_SET_CHILD_SUBREAPER",
        "no host: detached processes would outlive their child",
        is_needed=True,
    ),
    _Probe(
        "processes in /proc",
        attempts.processes,
        "looked for hidepid= among the options of /proc",
        "no host: it must see its launchpad and children; mount it without (systemd:"
        " ProtectProc=default)",
        is_needed=True,
    ),
    _Probe(
        "descriptors",
        attempts.descriptors,
        "getrlimit(2) RLIMIT_NOFILE",
        "no host: children's files need descriptors",
        is_needed=True,
    ),
    _Probe(
        "flock in TMPDIR",
        attempts.flock,
        "flock(2) on the directory",
        "no private root or TMPDIR: a later host could not tell which are in use",
        is_needed=True,
    ),
    _Probe(
        "openat2",
        attempts.openat2,
        "openat2(2) of '.' and '..' with RESOLVE_BENEATH",
        "names are walked one part at a time with O_NOFOLLOW; slower, as safe",
    ),
    _Probe(
        "close_range",
        attempts.close_range,
        "close_range(2) on unused numbers",
        "descriptors are marked one by one; slower",
    ),
    _Probe(
        "lists of children",
        attempts.children_lists,
        "read /proc/thread-self/children",
        "every process of the machine is read to end a tree; slower",
    ),
    _Probe(
        "O_TMPFILE in TMPDIR",
        attempts.tmpfile,
        "open(2) of an unnamed file",
        "files to be published have a name (.sandhost-*) meanwhile, which a crash of"
        " the machine can leave",
    ),
    _Probe(
        "RWF_NOWAIT in TMPDIR",
        attempts.nowait,
        "preadv2(2) of a file just written",
        "every READ goes through a thread; some 100 us slower",
    ),
    _Probe(
        "Landlock", attempts.landlock, "landlock_create_ruleset(2), version", _LAYER
    ),
    _Probe("seccomp filters", attempts.seccomp, "seccomp(2) GET_ACTION_AVAIL", _LAYER),
    _Probe(
        "user namespaces",
        attempts.user_namespace,
        "unshare(2) and a mapping, in a process of its own",
        "a host that is not root makes no namespaces for its children",
    ),
    _Probe(
        "cgroup v2",
        attempts.cgroup,
        "mkdir(2) and rmdir(2) in its own group; what stands in a new one",
        "limits hold for each process, not for all of a child's together",
    ),
    _Probe(
        "detached layers",
        attempts.detached_layers,
        "an overlay on a tmpfs, of layers that are attached nowhere",
        "a workspace's layers are attached in a mount namespace of the host's",
    ),
    _Probe(
        "layers by descriptor",
        attempts.attached_layers,
        "an overlay on a tmpfs, of layers in a mount namespace of its own",
        "a workspace's layers are given by name",
    ),
    _Probe(
        "layers by name",
        attempts.named_layers,
        "the same, with /proc/self/fd/N as the options of mount(2)",
        "nothing, if they are given by descriptor; else no workspace to review",
    ),
    _Probe(
        "bubblewrap",
        attempts.bubblewrap,
        "looked for bwrap in PATH; not run",
        "nothing: namespaces are made without it",
    ),
)
"""All probes, those of a host's needs first."""
