"""Work in a workspace, beside the same work in the directory and in other layers.

One program does the same steps in each world and times them itself: the directory as it
is, a workspace, an overlay mount made by hand, fuse-overlayfs, and sandlock. The base lies
on tmpfs, so that no disk is measured. Ratios are of neighbours in one round.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import AbsentError, MeasureError, in_turn, run, workplace
from benchmarks.options import add_sandhost, parse, parser
from benchmarks.report import Aim, Report, Row, at_least, at_most

NAME = "workspace"
METHOD = "the same steps in each world on tmpfs, medians of ratios of neighbours"
ROUNDS = 3
STARTS = 40
REPOSITORY_FILES = 20_000
MANY_FILES = 40_000
BIG_BASE_FILES = 100_000
CHANGED_FILES = 1_000
WORK_S = 150.0

# The steps, run inside each world with the base as its working directory. Prints seconds by
# step, or why it failed. A step without its program on a machine is left out.
STEPS = r"""
import json, os, shutil, sqlite3, subprocess, sys, time
os.environ["HOME"] = "/"  # no settings of git's
found = {}
def step(name, work):
    start = time.perf_counter()
    try:
        work()
    except (OSError, RuntimeError, sqlite3.Error) as error:
        found[name] = str(error)
    else:
        found[name] = time.perf_counter() - start
def command(*argv):
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode and (argv[0] != "rg" or done.returncode > 1):
        raise RuntimeError(f"{argv[0]} failed: {done.stderr.decode().strip()[-60:]}")
def write_rows():
    with sqlite3.connect("rows.db") as base:
        base.execute("create table t (n integer, words text)")
    for number in range(2000):
        with base:
            base.execute("insert into t values (?, 'some words')", (number,))
    base.close()
def write_first():
    for number in range(1000):
        with open(f"first/{number}", "ab") as file:
            file.write(b"x")
git = ("git", "-c", "safe.directory=*", "status", "--porcelain")
if shutil.which("git"):
    step("git status, the first", lambda: command(*git))
    step("git status, the second", lambda: command(*git))
    step("git status, the third", lambda: command(*git))
if shutil.which("rg"):
    step("rg", lambda: command("rg", "-c", "no such words"))
step("compileall", lambda: command(sys.executable, "-m", "compileall", "-q", "-f", "d0"))
step("sqlite, 2,000 transactions", write_rows)
step("untar of 40,000 files", lambda: command("tar", "--no-same-owner", "-xf", "many.tar"))
step("rm -rf of them", lambda: command("rm", "-r", "new"))
step("first write to 1,000 files", write_first)
step("rm -rf of 40,000 base files", lambda: command("rm", "-r", "many"))
print(json.dumps(found))
"""

# Starts children in one host, with and without a workspace in turn; prints seconds.
START = r"""
from supervisor.spawn.launchpad.start import start_launchpad
launchpad = start_launchpad()
import json, os, sys, time, trio
from supervisor.host import open_host
from supervisor.sandbox.plan import PROFILES
from supervisor.sandbox.scratch import Scratch
from supervisor.spec import ChildSpec, minimal_env
from supervisor.workspace.run import prepare_use
rounds, base, state = int(sys.argv[1]), sys.argv[2], sys.argv[3]
async def main():
    times = {"with": [], "without": []}
    null = os.open(os.devnull, os.O_RDWR)
    use = prepare_use(base, "review", state, "measured")
    async with open_host(launchpad) as host:
        for number in range(2 * rounds):
            name = ("with", "without")[number % 2]
            scratch = Scratch(None, has_user=True)
            spec = ChildSpec(
                ("/bin/true",), cwd=base, root=scratch.root, run_dir=scratch.run,
                made_in=scratch.fd, tmp_dir=scratch.tmp, env=minimal_env(scratch.tmp),
                stdio=(null,) * 3, sandbox=PROFILES["auto"],
                workspaces=(use,) if name == "with" else (),
            )
            start = time.perf_counter()
            child = await host.spawn(spec)
            times[name].append(time.perf_counter() - start)
            if child.failure is not None:
                raise SystemExit(child.failure.text)
            await child.wait_gone()
            await scratch.remove()
    print(json.dumps(times))
trio.run(main)
"""

Seconds = dict[str, float | str]

NEAR_NATIVE = (
    "git status, the second",
    "git status, the third",
    "rg",
    "compileall",
    "sqlite, 2,000 transactions",
)
NEAR_OVERLAY = (
    "untar of 40,000 files",
    "rm -rf of them",
    "first write to 1,000 files",
    "rm -rf of 40,000 base files",
)
PEERS: dict[str, tuple[tuple[str, ...], Aim]] = {
    "native": (NEAR_NATIVE, at_least(0.75)),
    "overlay by hand": (NEAR_OVERLAY, at_least(0.9)),
    "fuse-overlayfs": (NEAR_NATIVE + NEAR_OVERLAY, at_least(1.0)),
    "sandlock": (NEAR_NATIVE + NEAR_OVERLAY, at_least(1.0)),
}
"""The steps that are compared with each world, and the aim of their ratio."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run has its trees, and what it measures."""

    directory: Path
    sandhost: Path
    sandlock: Path | None

    @property
    def base(self) -> Path:
        """Return the base that no world may change."""
        return self.directory / "base"

    @contextlib.contextmanager
    def fresh(self, *names: str) -> Iterator[list[Path]]:
        """Make empty directories, removed at the end."""
        with tempfile.TemporaryDirectory(dir=self.directory) as top:
            made = [Path(top) / name for name in names]
            for path in made:
                path.mkdir()
            yield made


def make_base(base: Path) -> None:
    """Make a git repository with files to read, to write to and to remove."""
    base.mkdir()
    text = "def add(first, second):\n    return first + second\n\n" * 30
    _fill(base, REPOSITORY_FILES, 1_000, text, "d{}/m{}.py")
    _git(base, "init", "-q")
    _git(base, "add", "-A")
    _git(base, "commit", "-q", "-m", "all")
    (base / ".gitignore").write_text("/many\n/first\n/many.tar\n/new\n")
    _fill(base, MANY_FILES, 1_000, "content\n", "many/{}/{}")
    _fill(base, CHANGED_FILES, CHANGED_FILES, "x" * 10_240, "first/{1}")
    run(["tar", "-C", str(base), "--transform", "s/^many/new/", "-cf",
         str(base / "many.tar"), "many"], timeout_s=60)  # fmt: skip


def _fill(top: Path, count: int, wide: int, text: str, form: str) -> None:
    made = set()
    for number in range(count):
        path = top / form.format(number // wide, number % wide)
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        path.write_text(text)


def _git(base: Path, *words: str) -> None:
    name = ("-c", "user.name=bench", "-c", "user.email=bench@example.com")
    run(["git", "-C", str(base), *name, *words], timeout_s=60)


def _worked(argv: Sequence[str], cwd: Path) -> Seconds:
    """Run the steps by a command; return what they printed."""
    try:
        done = subprocess.run(
            [*argv, sys.executable, "-c", STEPS], cwd=cwd, timeout=WORK_S,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise MeasureError(f"{argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise MeasureError(f"the steps did not end in {WORK_S:g} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2]
        raise MeasureError(f"the steps failed with status {done.returncode}: {said}")
    found: Seconds = json.loads(done.stdout.splitlines()[-1])
    return found


def work_natively(place: Place) -> Seconds:
    """Run the steps in a copy of the base, as nothing could be quicker."""
    with place.fresh("copy") as (copy,):
        run(["cp", "-a", f"{place.base}/.", str(copy)], timeout_s=60)
        return _worked((), copy)


def work_in_workspace(place: Place) -> Seconds:
    """Run the steps in a workspace of the command under test."""
    with place.fresh("state") as (state,):
        told = (str(place.sandhost), "run", "--workspace", str(place.base))
        kept = ("--state-dir", str(state), "--commit", "never")
        return _worked((*told, *kept, "--"), place.base)


def work_in_overlay(place: Place) -> Seconds:
    """Run the steps in an overlay mount as a person would make it."""
    with place.fresh("upper", "work", "merged") as (upper, work, merged):
        layers = f"lowerdir={place.base},upperdir={upper},workdir={work}"
        options = "" if os.geteuid() == 0 else ",userxattr"
        space = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")
        mount = f"mount -t overlay overlay -o {layers}{options} {merged}"
        script = f'{mount} && cd {merged} && exec "$@"'
        return _worked((*space, "sh", "-c", script, "sh"), place.directory)


def work_in_fuse(place: Place) -> Seconds:
    """Run the steps in fuse-overlayfs, a copy-on-write layer in a process."""
    if shutil.which("fuse-overlayfs") is None:
        raise AbsentError("fuse-overlayfs is not installed")
    with place.fresh("upper", "work", "merged") as (upper, work, merged):
        layers = f"lowerdir={place.base},upperdir={upper},workdir={work}"
        run(["fuse-overlayfs", "-o", layers, str(merged)])
        try:
            return _worked((), merged)
        finally:
            run(
                [
                    "umount" if os.geteuid() == 0 else "fusermount3",
                    *_UNMOUNT,
                    str(merged),
                ]
            )


_UNMOUNT = () if os.geteuid() == 0 else ("-u",)

SANDLOCK = r"""
import sys
from sandlock import BranchAction, Sandbox
base, readable, argv = sys.argv[1], sys.argv[2:4], sys.argv[4:]
sandbox = Sandbox(
    workdir=base, cwd=base, fs_writable=[base, "/dev"],
    fs_readable=["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", *readable],
    on_exit=BranchAction.ABORT, on_error=BranchAction.ABORT,
)
done = sandbox.run(argv)
sys.stdout.write((done.stdout or b"").decode())
sys.stderr.write((done.stderr or b"").decode())
sys.exit(done.exit_code)
"""


def work_in_sandlock(place: Place) -> Seconds:
    """Run the steps in sandlock, whose copies are made by a supervisor of calls."""
    readable = (sys.base_prefix, sys.prefix)
    argv = (str(place.sandlock), "-c", SANDLOCK, str(place.base), *readable)
    return _worked(argv, place.directory)


WORLDS: dict[str, Callable[[Place], Seconds]] = {
    "native": work_natively,
    "workspace": work_in_workspace,
    "overlay by hand": work_in_overlay,
    "fuse-overlayfs": work_in_fuse,
    "sandlock": work_in_sandlock,
}


def work_rows(place: Place, rounds: int) -> list[Row]:
    """Compare the steps in a workspace with those in the other worlds."""
    faults: dict[str, MeasureError] = {}
    worlds = [name for name in WORLDS if name != "sandlock" or place.sandlock]
    seen: dict[str, list[Seconds]] = {name: [] for name in worlds}
    attempts = [_attempt(place, name, faults) for name in worlds]
    for number in range(rounds):
        for name, found in zip(worlds, in_turn(number, attempts), strict=True):
            if found is not None:
                seen[name].append(found)
    for name in ("native", "workspace"):
        if name in faults:
            raise MeasureError(f"{name}: {faults[name]}")
    rows = [_ratio("git status, the first", "native", seen, None)]
    for peer in worlds:
        steps, aim = PEERS.get(peer, ((), None))
        if peer in faults:
            why = faults[peer]
            is_absent = isinstance(why, AbsentError)
            name, told = f"beside {peer}", str(why)
            rows.append(Row(name, None, "x", detail=told, is_absent=is_absent))
        else:
            rows += [_ratio(step, peer, seen, aim) for step in steps]
    return rows


def _attempt(
    place: Place, name: str, faults: dict[str, MeasureError]
) -> Callable[[], Seconds | None]:
    def attempt() -> Seconds | None:
        if name in faults:
            return None
        try:
            return WORLDS[name](place)
        except MeasureError as error:
            faults[name] = error
            return None

    return attempt


def _ratio(
    step: str, peer: str, seen: dict[str, list[Seconds]], aim: Aim | None
) -> Row:
    """Return how many times as quick the step is in a workspace as beside a peer."""
    name = f"{step}: {peer} / workspace"
    ours: list[float] = []
    theirs: list[float] = []
    for our, their in zip(seen["workspace"], seen[peer], strict=True):
        for world, found in (("workspace", our), (peer, their)):
            if step not in found:
                absent = "its program is not installed"
                return Row(name, None, "x", aim, absent, is_absent=True)
            took = found[step]
            if isinstance(took, str):
                return Row(name, None, "x", aim, f"{world}: {took}")
            (ours if found is our else theirs).append(took)
    pairs = zip(theirs, ours, strict=True)
    ratio = statistics.median(their / our for their, our in pairs)
    peer_s, ours_s = statistics.median(theirs), statistics.median(ours)
    data = {"peer_s": peer_s, "workspace_s": ours_s}
    return Row(name, ratio, "x", aim, f"{peer_s:.3f} / {ours_s:.3f} s", data)


def start_rows(place: Place, rounds: int) -> list[Row]:
    """Compare a start with a workspace with one without, in one host."""
    rows = []
    for name, base in (("61,000 files", place.base), ("empty", None)):
        with place.fresh("state", "empty") as (state, empty):
            where = str(base or empty)
            count = str(STARTS * rounds)
            told = run(
                [sys.executable, "-c", START, count, where, str(state)], None, 90
            )
            times = json.loads(told.stdout)
        took, plain = (
            statistics.median(times[key]) * 1e3 for key in ("with", "without")
        )
        what = f"start with a workspace, base of {name}"
        detail = f"{took:.2f} - {plain:.2f} ms"
        data = {"with_ms": took, "without_ms": plain}
        rows.append(Row(what, took - plain, "ms", at_most(2.0), detail, data))
    return rows


def diff_rows(place: Place, rounds: int) -> list[Row]:
    """Compare a look at 1,000 changes of 100,000 files with git's look at the copy."""
    with place.fresh("big", "state") as (big, state):
        _fill(big, BIG_BASE_FILES, 1_000, "content\n", "d{}/{}")
        _git(big, "init", "-q")
        _git(big, "add", "-A")
        _git(big, "commit", "-q", "-m", "all")
        change = "for d in d*; do for n in 0 1 2 3 4 5 6 7 8 9; do echo more >> $d/$n; done; done"
        keep = ["--state-dir", str(state)]
        run([str(place.sandhost), "run", "--workspace", str(big), *keep, "--commit",
             "never", "--workspace-name", "w", "--", "sh", "-c", change])  # fmt: skip
        with place.fresh("copy") as (copy,):
            run(["cp", "-a", f"{big}/.", str(copy)], timeout_s=60)
            run(["sh", "-c", f"cd {copy} && {change}"])
            _git(copy, "status", "--porcelain")
            looks = _looks(place, copy, keep)
            times = [in_turn(number, looks) for number in range(5 * rounds)]
    git, whole, by_itself = (
        statistics.median(column) for column in zip(*times, strict=True)
    )
    name = "diff of 1,000 of 100,000 files: git status / "
    detail = f"{git * 1e3:.0f} / {whole * 1e3:.0f} ms"
    own = f"{git * 1e3:.0f} / {by_itself * 1e3:.0f} ms"
    data = {"git_s": git, "command_s": whole, "call_s": by_itself}
    return [
        Row(f"{name}workspace diff", git / whole, "x", at_least(5.0), detail, data),
        Row(f"{name}Workspace.changes", git / by_itself, "x", None, own),
    ]


def _looks(place: Place, copy: Path, keep: list[str]) -> list[Callable[[], float]]:
    from supervisor.workspace.workspace import Workspace  # noqa: PLC0415

    def look_by_git() -> float:
        return _took(lambda: _git(copy, "status", "--porcelain"))

    def look_by_command() -> float:
        argv = [str(place.sandhost), "workspace", "diff", "w", "--name-only", *keep]
        return _took(lambda: subprocess.run(argv, stdout=subprocess.PIPE, check=False))

    def look_by_call() -> float:
        with Workspace(keep[1], "w") as workspace:
            return _took(workspace.changes)

    return [look_by_git, look_by_command, look_by_call]


def _took(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def commit_rows(place: Place, rounds: int) -> list[Row]:
    """Compare a commit of 1,000 files of 10 KiB with `cp -a` of them, both synced."""
    ratios = []
    for _ in range(rounds):
        with place.fresh("base", "state", "copy") as (base, state, copy):
            (base / "kept").write_text("kept\n")
            keep = ["--state-dir", str(state)]
            fill = "for n in $(seq 1000); do head -c 10240 /dev/zero > $n; done"
            run([str(place.sandhost), "run", "--workspace", str(base), *keep, "--commit",
                 "never", "--workspace-name", "w", "--", "sh", "-c", fill])  # fmt: skip
            made = state / "workspaces" / "w" / "upper"
            copy_all = ["sh", "-c", f"cp -a {made} {copy} && sync -f {copy}"]
            peer = _took(partial(run, copy_all))
            commit = [str(place.sandhost), "workspace", "commit", "w", *keep]
            ours = _took(partial(run, commit))
            if len(list(base.iterdir())) != 1_001:
                raise MeasureError("the commit did not bring 1,000 files")
            ratios.append((ours / peer, ours, peer))
    ratio, ours, peer = sorted(ratios)[len(ratios) // 2]
    detail = f"{ours * 1e3:.0f} / {peer * 1e3:.0f} ms"
    name = f"commit of 1,000 files of 10 KiB / cp -a, {_file_system(place.directory)}"
    return [Row(name, ratio, "x", at_most(3.0), detail)]


def fork_rows(place: Place, rounds: int) -> list[Row]:
    """Time a fork of a workspace with 1,000 files beside a copy of the tree."""
    from supervisor.workspace.workspace import Workspace  # noqa: PLC0415

    with place.fresh("state", "copies") as (state, copies):
        keep = ["--state-dir", str(state)]
        fill = "for n in $(seq 1000); do head -c 10240 /dev/zero > $n; done"
        run([str(place.sandhost), "run", "--workspace", str(place.base), *keep,
             "--commit", "never", "--workspace-name", "w", "--", "sh", "-c", fill])  # fmt: skip
        with Workspace(str(state), "w") as workspace:
            first_s = _took(workspace.fork)
            forks = [_took(workspace.fork) for _ in range(5 * rounds)]
        copy = ["cp", "-a", "--reflink=auto", str(place.base), str(copies)]
        copied_s = _took(partial(run, copy, None, 60.0))
    took_s = statistics.median(forks)
    where = _file_system(place.directory)
    detail = f"cp -a --reflink=auto {copied_s * 1e3:.0f} ms"
    return [
        Row(f"fork, {where}", took_s * 1e3, "ms", at_most(5.0), detail),
        Row(f"fork that seals first, {where}", first_s * 1e3, "ms", at_most(5.0)),
    ]


def _file_system(path: Path) -> str:
    return run(["stat", "-f", "-c", "%T", str(path)]).stdout.strip()


def _options() -> argparse.ArgumentParser:
    made = parser(NAME, METHOD, rounds=ROUNDS)
    add_sandhost(made)
    made.add_argument(
        "--sandlock", type=Path, metavar="FILE", help="a Python that has sandlock"
    )
    made.add_argument(
        "--disk",
        type=Path,
        default=Path("/var/tmp"),  # noqa: S108 - a disk, where the system has one
        metavar="DIR",
        help="where the commit is measured a second time (default /var/tmp)",
    )
    return made


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    given = parse(_options(), argv)
    rows: list[Row] = []
    with workplace() as top, tempfile.TemporaryDirectory(dir=given.disk) as disk:
        place = Place(top, given.sandhost, given.sandlock)
        on_disk = Place(Path(disk), given.sandhost, given.sandlock)
        make_base(place.base)
        for part, where in (
            (start_rows, place),
            (work_rows, place),
            (diff_rows, place),
            (commit_rows, place),
            (commit_rows, on_disk),
            (fork_rows, place),
        ):
            try:
                rows += part(where, given.rounds)
            except MeasureError as error:
                rows.append(Row(part.__name__, None, "", detail=str(error)))
    report = Report(NAME, METHOD, given.rounds, rows)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
