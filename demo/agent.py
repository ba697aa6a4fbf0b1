#!/usr/bin/env python3
"""A coding agent, as people have them: it knows nothing of the host that it runs under.

    agent.py TASK

It asks a model by the client of OpenAI, which reads OPENAI_BASE_URL and OPENAI_API_KEY,
and does what the model asks for: it runs commands, reads files and edits them.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai


def run(command: str) -> str:
    """Run a command of the shell; return what it printed."""
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=False
    )
    return f"{done.stdout}{done.stderr}\nexit status {done.returncode}"


def read(path: str) -> str:
    """Return the text of a file."""
    with open(path, encoding="utf-8") as file:  # noqa: PTH123  (as agents do)
        return file.read()


def edit(path: str, old: str, new: str) -> str:
    """Replace a text in a file."""
    text = Path(path).read_text(encoding="utf-8")
    if old not in text:
        return f"there is no such text in {path}"
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text.replace(old, new, 1))
    return f"{path} is edited"


TOOLS: dict[str, tuple[Callable[..., str], list[str]]] = {
    "run": (run, ["command"]),
    "read": (read, ["path"]),
    "edit": (edit, ["path", "old", "new"]),
}


def described() -> list[Any]:
    """Return the tools as the model is told of them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": function.__doc__,
                "parameters": {
                    "type": "object",
                    "properties": {one: {"type": "string"} for one in arguments},
                    "required": arguments,
                },
            },
        }
        for name, (function, arguments) in TOOLS.items()
    ]


def main(task: str) -> None:
    """Ask the model, and do what it says, until it calls no tool any more."""
    client = openai.OpenAI()
    messages: list[Any] = [
        {"role": "system", "content": "You are a coding agent. Use the tools."},
        {"role": "user", "content": task},
    ]
    while True:
        answer = client.chat.completions.create(
            model="any", messages=messages, tools=described()
        )
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            print(said.content)
            return
        for call in said.tool_calls:
            assert call.type == "function"  # noqa: S101  (all that were offered)
            words = json.loads(call.function.arguments)
            print(f"{call.function.name} {' '.join(words.values())}".split("\n")[0])
            result = TOOLS[call.function.name][0](**words)
            print("  " + result.strip().splitlines()[-1])
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )


if __name__ == "__main__":
    main(sys.argv[1])
