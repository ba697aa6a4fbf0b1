"""Steps of a scripted conversation, as calls of the tools that a request offers.

A step says what is to be done, not by which tool:

    {"run": COMMAND}
    {"look": DIRECTORY}
    {"read": FILE}
    {"edit": FILE, "old": TEXT, "new": TEXT}

Each agent has tools of its own for these: `TOOLS` names them, first choice first, and
`MEANINGS` what their arguments are called. Where there is none, a command does it.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from demo.provider.question import Tool

Step = dict[str, Any]

MEANINGS: dict[str, tuple[str, ...]] = {
    "run": ("command", "cmd"),
    "look": ("path", "dir_path"),
    "read": ("file_path", "filePath", "path", "absolute_path"),
    "edit": ("file_path", "filePath", "path"),
    "old": ("old_string", "oldString", "old_text", "oldText"),
    "new": ("new_string", "newString", "new_text", "newText"),
}
"""The names that arguments of tools have for a part of a step."""

FILLERS = {"description": "Do the next step", "is_background": False}
"""Arguments that some tools demand beside."""


def _javascript(tool: str, given: Any) -> str:
    """Return a program for Codex's `exec`, which calls a tool and tells its result."""
    return f"text(await tools.{tool}({json.dumps(given)}))"


def _patch(step: Step) -> str:
    """Return an edit as a patch of the kind that `apply_patch` takes."""
    lines = ["*** Begin Patch", f"*** Update File: {step['edit']}", "@@"]
    lines += [f"-{line}" for line in step["old"].splitlines()]
    lines += [f"+{line}" for line in step["new"].splitlines()]
    return "\n".join([*lines, "*** End Patch", ""])


OWN: dict[tuple[str, str], Callable[[Step], Any]] = {
    ("run", "exec"): lambda s: _javascript("exec_command", {"cmd": s["run"]}),
    ("run", "shell"): lambda s: {"command": ["bash", "-lc", s["run"]]},
    ("run", "run_commands"): lambda s: {"commands": [s["run"]]},
    ("edit", "exec"): lambda s: _javascript("apply_patch", _patch(s)),
    ("edit", "apply_patch"): _patch,
}
"""Arguments that no table of names can make, by step and tool."""

TOOLS: dict[str, tuple[str, ...]] = {
    "run": (
        "exec_command", "exec", "shell", "shell_command", "Bash", "bash",
        "run_shell_command", "run_commands",
    ),
    "read": ("Read", "read", "read_file"),
    "edit": ("apply_patch", "exec", "Edit", "edit", "replace", "editor"),
    "look": ("list_directory", "list"),
}  # fmt: skip
"""The tools that do a step."""


def call_for(step: Step, tools: Mapping[str, Tool]) -> list[Any] | None:
    """Return the call that does a step: tool and arguments; None if no tool can."""
    kind = next(iter(step))
    # A host that translates writes a namespace before the name.
    known = {name.rpartition("__")[2]: name for name in tools}
    for name in TOOLS[kind]:
        if name not in known:
            continue
        given = _arguments(step, kind, name, tools[known[name]])
        if given is not None:
            return [known[name], given]
    if kind == "run":
        return None
    return call_for({"run": command_for(step)}, tools)


def command_for(step: Step) -> str:
    """Return the command that does a step."""
    match step:
        case {"read": path}:
            return f"cat {shlex.quote(path)}"
        case {"look": path}:
            return f"ls -la {shlex.quote(path)}"
        case {"edit": path, "old": old, "new": new}:
            program = (
                "import sys;p,o,n=sys.argv[1:];t=open(p).read();"
                "assert o in t;open(p,'w').write(t.replace(o,n,1))"
            )
            words = ["python3", "-c", program, path, old, new]
            return shlex.join(words)
        case _:
            return str(step["run"])


def _arguments(step: Step, kind: str, name: str, tool: Tool) -> Any:
    """Return arguments by which a tool does a step; None if it takes others."""
    make = OWN.get((kind, name))
    if make is not None:
        given = make(step)
        is_text = isinstance(given, str)
        return {"input": given} if is_text and not tool.is_custom else given
    known = (tool.schema or {}).get("properties") or {}
    found = {one: FILLERS[one] for one in known if one in FILLERS}
    for part, value in step.items():
        names = MEANINGS[part]
        fitting = [one for one in names if one in known] if known else names[:1]
        if not fitting:
            return None
        found[fitting[0]] = value
    return found
