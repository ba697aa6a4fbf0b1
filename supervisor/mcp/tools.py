"""``sandhost mcp --files`` as a list of tools: names, schemas, calls.

Passes each call to ``files`` or ``commands``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hostlib.threads import in_thread
from supervisor.mcp import files
from supervisor.mcp.commands import Commands, Exec
from supervisor.mcp.files import McpToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from supervisor.spawn.launcher import Launcher

INSTRUCTIONS = (
    "You work in a sandbox. read, write, edit, list and search act on files, exec runs a"
    " shell command; relative paths begin in the working directory, {cwd}. What lies"
    " elsewhere may not be there, or be to read only; TMPDIR is yours to write. Long"
    " answers are cut and say how to go on."
)
"""The first instructions for an agent."""

_BY_NAME: dict[str, tuple[type[msgspec.Struct], Callable[[Any], str]]] = {
    "read": (files.Read, files.read),
    "write": (files.Write, files.write),
    "edit": (files.Edit, files.edit),
    "list": (files.List, files.list_directory),
    "search": (files.Search, files.search),
}
_EXEC = "exec"


class AgentTools:
    """The tools of one session.

    Args:
        launcher: starts commands.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._commands = Commands(launcher)

    def has(self, name: str) -> bool:
        """Return whether a name is one of these tools."""
        return name == _EXEC or name in _BY_NAME

    def describe(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the name, description and argument schema of each tool."""
        for name, (form, _) in _BY_NAME.items():
            yield name, _describe_form(form), _schema(form)
        yield _EXEC, _describe_form(Exec), _schema(Exec)

    async def call(self, name: str, arguments: dict[str, object]) -> str:
        """Return the answer of a call.

        Raises:
            McpToolError: it failed; the text is for the agent.

            LaunchpadLost: no command can be run any more.

        Cancellation: soon; a write that has begun is finished.
        """
        if name == _EXEC:
            return await self._commands.run(_parse(name, Exec, arguments))
        form, do = _BY_NAME[name]
        work = partial(do, _parse(name, form, arguments))
        return await in_thread(work)


def _parse(name: str, form: type[Any], arguments: dict[str, object]) -> Any:
    try:
        return msgspec.convert(arguments, form)
    except msgspec.ValidationError as why:
        text = f"cannot call {name}: {why}; look at its schema"
        raise McpToolError(text) from None


def _describe_form(form: type[msgspec.Struct]) -> str:
    return " ".join((form.__doc__ or "").split())


def _schema(form: type[msgspec.Struct]) -> dict[str, Any]:
    whole = msgspec.json.schema(form)
    schema: dict[str, Any] = whole["$defs"][form.__name__]
    return {k: v for k, v in schema.items() if k not in {"title", "description"}}
