"""Steps of a scripted conversation, as the tools of known agents take them."""

import json
from typing import Any

import pytest

from demo.provider.question import Question
from demo.provider.steps import call_for

EDIT = {"edit": "/w/a", "old": "x\n", "new": "y\n"}
PATCH = """*** Begin Patch
*** Update File: /w/a
@@
-x
+y
*** End Patch
"""


def question(api: Any, *tools: dict[str, Any]) -> Question:
    """Return a request that offers tools."""
    return Question(api, {"tools": [*tools]})


def schema(*names: str) -> dict[str, Any]:
    """Return a schema of arguments."""
    return {"type": "object", "properties": {name: {} for name in names}}


def function(name: str, *names: str) -> dict[str, Any]:
    """Return a function of Chat."""
    parameters = schema(*names)
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CODEX_PLAIN = question(
    "responses",
    {"type": "function", "name": "exec_command", "parameters": schema("cmd")},
)
CODEX_PATCH = question(
    "responses",
    {"type": "function", "name": "shell"},
    {"type": "custom", "name": "apply_patch"},
)
CLAUDE = question(
    "messages",
    {"name": "Bash", "input_schema": schema("command", "description")},
    {"name": "Read", "input_schema": schema("file_path")},
    {"name": "Edit", "input_schema": schema("file_path", "old_string", "new_string")},
)
OPENCODE = question(
    "chat",
    function("bash", "command", "description"),
    function("edit", "filePath", "oldString", "newString"),
)
TRANSLATED = question("chat", function("functions__exec", "input"))
OTHER_EDIT = question(
    "chat", function("bash", "command"), function("edit", "path", "edits")
)


@pytest.mark.parametrize(
    ("asked", "step", "call"),
    [
        (CODEX_PLAIN, {"run": "ls"}, ["exec_command", {"cmd": "ls"}]),
        (CODEX_PLAIN, {"read": "/w/a b"}, ["exec_command", {"cmd": "cat '/w/a b'"}]),
        (CODEX_PATCH, {"run": "ls"}, ["shell", {"command": ["bash", "-lc", "ls"]}]),
        (CODEX_PATCH, EDIT, ["apply_patch", PATCH]),
        (
            CLAUDE,
            {"run": "ls"},
            ["Bash", {"description": "Do the next step", "command": "ls"}],
        ),
        (CLAUDE, {"read": "/w/a"}, ["Read", {"file_path": "/w/a"}]),
        (
            CLAUDE,
            EDIT,
            ["Edit", {"file_path": "/w/a", "old_string": "x\n", "new_string": "y\n"}],
        ),
        (
            OPENCODE,
            EDIT,
            ["edit", {"filePath": "/w/a", "oldString": "x\n", "newString": "y\n"}],
        ),
        (
            TRANSLATED,
            {"run": "ls"},
            [
                "functions__exec",
                {"input": 'text(await tools.exec_command({"cmd": "ls"}))'},
            ],
        ),
        (question("chat"), {"run": "ls"}, None),
        (question("chat"), EDIT, None),
    ],
)
def test_a_step_is_a_call_of_what_is_offered(
    asked: Question, step: dict[str, Any], call: list[Any] | None
) -> None:
    assert call_for(step, asked.tools) == call


def test_an_edit_is_a_command_where_no_tool_fits() -> None:
    for asked in (CODEX_PLAIN, OTHER_EDIT):
        call = call_for(EDIT, asked.tools)
        assert call is not None
        name, given = call
        assert name in {"exec_command", "bash"}
        assert "/w/a" in json.dumps(given)


def test_tools_of_codex_may_stand_in_the_input() -> None:
    tools = [
        {"type": "custom", "name": "exec"},
        {"type": "function", "name": "wait", "parameters": schema("cell_id")},
    ]
    more = {
        "type": "additional_tools",
        "tools": [{"type": "namespace", "name": "functions", "tools": tools}],
    }
    asked = Question("responses", {"input": [more]})
    assert asked.tools["exec"].is_custom
    assert {tool.namespace for tool in asked.tools.values()} == {"functions"}
    name, program = call_for({"run": 'echo "a"'}, asked.tools) or ("", "")
    assert name == "exec"
    assert program == 'text(await tools.exec_command({"cmd": "echo \\"a\\""}))'
    _, program = call_for(EDIT, asked.tools) or ("", "")
    assert program == f"text(await tools.apply_patch({json.dumps(PATCH)}))"
    # Each byte of a tool is counted, wherever it stands.
    assert asked.count(dense=True) > len(json.dumps(tools, separators=(",", ":")))
