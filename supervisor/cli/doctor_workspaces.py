"""The modes of a workspace on this machine: each is tried by an empty run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hostlib.paths import usual_state_dir
from supervisor.cli.doctor_layers import MISSING, PRESENT
from supervisor.sandbox.attempts import used_layers
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.use import MODES

_TRIED_S = 20.0
_SCRIPTS = {"read-only": "cat file", "direct": "echo new > file"}
_SCRIPT = "echo new > file && mkdir d && rmdir d && mkdir d && mv d e"


def missing_modes(reason: str) -> list[dict[str, str]]:
    """Return a row for each mode that says why it is missing."""
    return [_row(mode, reason) for mode in MODES]


def try_modes() -> list[dict[str, str]]:
    """Return a row for each mode: mode, state, and how it is made or why not.

    The trials run where workspaces are kept, in a directory that is removed again.
    """
    place = Path(os.environ.get("SANDHOST_STATE") or usual_state_dir()).absolute()
    try:
        while not place.is_dir():
            place = place.parent
        state = tempfile.mkdtemp(prefix=".sandhost-doctor-", dir=place)
    except OSError as why:
        reason = f"cannot keep workspaces in {str(place)!r}: {why.strerror}"
        return missing_modes(f"{reason}; name another directory (--state-dir)")
    try:
        with tempfile.TemporaryDirectory(prefix="sandhost-doctor-") as top:
            return _try_each(Path(top), state)
    except OSError as why:
        reason = f"cannot make a directory to try it in: {why.strerror}"
        return missing_modes(f"{reason}; name another one in TMPDIR")
    finally:
        remove_tree(Path(state))


def _try_each(top: Path, state: str) -> list[dict[str, str]]:
    """Run each mode at the same time; return their rows when all have ended."""
    running: dict[str, subprocess.Popen[str]] = {}
    faults: dict[str, str] = {}
    for mode in MODES:
        try:
            running[mode] = _start(mode, top, state)
        except OSError as why:
            reason = f"cannot start a run that tries it: {why.strerror}"
            faults[mode] = f"{reason}; name another directory in TMPDIR"
    faults |= {mode: _fault(process) for mode, process in running.items()}
    return [_row(mode, faults[mode]) for mode in MODES]


def _start(mode: str, top: Path, state: str) -> subprocess.Popen[str]:
    base = top / mode
    base.mkdir()
    (base / "file").write_text("old\n")
    script = _SCRIPTS.get(mode, _SCRIPT)
    argv = [
        sys.executable,
        "-I",
        "-m",
        "supervisor",
        "run",
        "--workspace",
        f"{base}:{mode}",
    ]
    argv += ["--state-dir", state, "--commit", "never", "--", "/bin/sh", "-c", script]
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _fault(process: subprocess.Popen[str]) -> str:
    """Return why a run failed; "" if it did not."""
    try:
        _, said = process.communicate(timeout=_TRIED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"a run that tried it did not end in {_TRIED_S:g} s"
    if process.returncode == 0:
        return ""
    last = said.strip().rpartition("\n")[2] or "it said nothing"
    text = f"a run that tried it ended with {process.returncode}: {last}"
    return last.removeprefix("sandhost run: ") if last.startswith("sandhost") else text


def _row(mode: str, fault: str) -> dict[str, str]:
    state = MISSING if fault else PRESENT
    return {"mode": mode, "state": state, "detail": fault or _describe_mode(mode)}


def _describe_mode(mode: str) -> str:
    if mode == "direct":
        return "the directory itself"
    if mode == "read-only":
        return "the directory itself, not written to"
    if os.geteuid() == 0:
        return f"an overlay mount that the host makes and holds, of {used_layers()}"
    text = f"an overlay mount in the child's user namespace, of {used_layers()}"
    return f"{text}; rename(2) of a directory of the base is EXDEV there"
