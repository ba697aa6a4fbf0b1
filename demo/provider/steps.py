"""Steps of a scripted conversation, as calls of the tools that a request offers.

A step says what is to be done, not by which tool:

    {"run": COMMAND}
    {"look": DIRECTORY}
    {"read": FILE}
    {"edit": FILE, "old": TEXT, "new": TEXT}

Each agent has tools of its own for these; the tables below name them, first choice
first. Where there is none, a command does it.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from demo.provider.question import Tool

Step = dict[str, Any]
Make = Callable[[Step], Any]


def _patch(step: Step) -> str:
    """Return an edit as a patch of the kind that `apply_patch` takes."""
    lines = ["*** Begin Patch", f"*** Update File: {step['edit']}", "@@"]
    lines += [f"-{line}" for line in step["old"].splitlines()]
    lines += [f"+{line}" for line in step["new"].splitlines()]
    return "\n".join([*lines, "*** End Patch", ""])


def _described(step: Step) -> dict[str, Any]:
    return {"command": step["run"], "description": "Do the next step"}


def _edit(path: str, old: str, new: str) -> Make:
    return lambda step: {path: step["edit"], old: step["old"], new: step["new"]}


RUN: dict[str, Make] = {
    "exec_command": lambda step: {"cmd": step["run"]},
    "shell": lambda step: {"command": ["bash", "-lc", step["run"]]},
    "shell_command": lambda step: {"command": step["run"]},
    "Bash": _described,
    "bash": _described,
    "run_shell_command": lambda step: {"command": step["run"], "is_background": False},
    "run_commands": lambda step: {"commands": [step["run"]]},
    "developer__shell": lambda step: {"command": step["run"]},
}
READ: dict[str, Make] = {
    "Read": lambda step: {"file_path": step["read"]},
    "read": lambda step: {"filePath": step["read"]},
    "read_file": lambda step: {"file_path": step["read"]},
}
EDIT: dict[str, Make] = {
    "apply_patch": _patch,
    "Edit": _edit("file_path", "old_string", "new_string"),
    "edit": _edit("filePath", "oldString", "newString"),
    "replace": _edit("file_path", "old_string", "new_string"),
    "editor": _edit("path", "old_text", "new_text"),
}
LOOK: dict[str, Make] = {
    "list_directory": lambda step: {"path": step["look"]},
}
TABLES = {"run": RUN, "read": READ, "edit": EDIT, "look": LOOK}


def call_for(step: Step, tools: Mapping[str, Tool]) -> list[Any] | None:
    """Return the call that does a step: tool and arguments; None if no tool can.

    The names of arguments are those of the tool's schema where the table's are not.
    """
    kind = next(iter(step))
    for name, make in TABLES[kind].items():
        if name in tools:
            return [name, _fitted(make(step), tools[name])]
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


def _fitted(given: Any, tool: Tool) -> Any:
    """Return arguments in the form that a tool takes."""
    if tool.is_custom == isinstance(given, str):
        return given
    if isinstance(given, str):
        return {"input": given}
    return given
