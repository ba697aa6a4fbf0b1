"""Children that keep a stop waiting: state, open files, last request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.linux import holdings
from supervisor.fsproxy.counts import NAMES

if TYPE_CHECKING:
    from protocol.messages import Request
    from supervisor.children.child import Child

MAX_FILES = 5
"""Open files that are named; the others are counted."""

MAX_NAMED = 10
"""Children that are named to a client that waits for a stop; the log names all."""

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel",
    "T": "stopped",
    "t": "stopped by a tracer",
    "Z": "zombie",
}
"""proc(5), field 3 of ``/proc/PID/stat``."""


def blocker(child: Child) -> dict[str, object]:
    """Return the state of a child that should have ended, as a JSON object."""
    process = child.process
    facts = None if process is None else holdings.process_facts(process.pid)
    files: list[str] = []
    request: str | None = None
    for session in child.sessions():
        files += [
            file.name.decode(errors="backslashreplace")
            for file in session.files.values()
        ]
        request = request or last_request(session.last_request)
    return {
        "id": child.id,
        "name": child.spec.name,
        "pid": None if process is None else process.pid,
        "state": child.state.value,
        "process": None if facts is None else STATES.get(facts.state, facts.state),
        "open_files": files[:MAX_FILES],
        "open_files_count": len(files),
        "last_request": request,
    }


def last_request(request: Request | None) -> str | None:
    """Return a request as its line begins; content never appears."""
    if request is None:
        return None
    words = [NAMES[type(request)]]
    for part in ("name", "fileno", "size"):
        value = getattr(request, part, None)
        if isinstance(value, bytes):
            words.append(value.decode(errors="backslashreplace"))
        elif value is not None:
            words.append(str(value))
    return " ".join(words)


def sentence(row: dict[str, object]) -> str:
    """Return a blocker as one line."""
    name = row["name"] or row["id"]
    files = row["open_files"]
    names = ", ".join(files) if isinstance(files, list) and files else "none"
    return (
        f"child {name} (pid {row['pid']}) does not end: {row['state']}, its process is"
        f" {row['process']}; open files: {names}; last request:"
        f" {row['last_request'] or 'none'}"
    )
