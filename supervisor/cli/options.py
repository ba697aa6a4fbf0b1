"""Options that several commands share, and their completion in a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import UsageFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from click.shell_completion import CompletionItem

    Completer = Callable[[click.Context, click.Parameter, str], list[Any]]


COMMAND_LINE: dict[str, Any] = {"allow_interspersed_args": False}
"""Settings of a command whose last words are a command line of their own."""

PATIENCE_S = 2.0
"""Longest wait for a host while a user waits for a completion."""


def one_of(*words: str) -> Completer:
    """Return a completer of fixed words."""

    def complete(_ctx: object, _param: object, incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def first_of(words: Iterable[str]) -> Completer:
    """Return a completer of fixed words for the first of an argument's words."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[str]:
        if ctx.params.get(param.name or ""):
            return []
        return [word for word in words if word.startswith(incomplete)]

    return complete


def children(
    ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the completions of a child's name; none if no host answers."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells only

    from supervisor.control.client import (  # noqa: PLC0415
        ControlError,
        call,
        find_control,
    )

    try:
        rows = call(find_control(ctx.params.get("control")), "ps", timeout_s=PATIENCE_S)
    except ControlError:
        return []
    found = {str(row.get("name") or row["id"]): str(row["state"]) for row in rows}
    return [
        CompletionItem(name, help=state)
        for name, state in sorted(found.items())
        if name.startswith(incomplete)
    ]


def agents(_ctx: object, _param: object, incomplete: str) -> list[str]:
    """Return the completions of an agent's name."""
    from supervisor.llm.recipe import recipe_names  # noqa: PLC0415 - for shells only

    return [name for name in recipe_names() if name.startswith(incomplete)]


def files(_ctx: object, _param: object, incomplete: str) -> list[CompletionItem]:
    """Return the completion of a file's name."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells only

    return [CompletionItem(incomplete, type="file")]


def directories(_ctx: object, _param: object, incomplete: str) -> list[CompletionItem]:
    """Return the completion of a directory's name."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells only

    return [CompletionItem(incomplete, type="dir")]


def _log_level(_ctx: object, _param: object, name: str) -> str:
    from hostlib.log import LEVELS  # noqa: PLC0415 - light, but only for hosts

    if name.upper() not in LEVELS:
        why = f"not a log level: {name!r}; write debug, info, warning, error"
        raise UsageFault(f"--log-level: {why}")
    return name.upper()


def _log_format(_ctx: object, _param: object, name: str | None) -> str | None:
    if name not in (None, "text", "json"):
        why = f"not a log format: {name!r}; write text or json"
        raise UsageFault(f"--log-format: {why}")
    return name


def log_level(usual: str) -> Callable[..., Any]:
    """Return the option for the least level of the log, in capitals."""
    return click.option(
        "--log-level",
        metavar="L",
        default=usual,
        callback=_log_level,
        shell_complete=one_of("debug", "info", "warning", "error"),
        help=f"debug, info, warning, error; default {usual}.",
    )


log_format = click.option(
    "--log-format",
    metavar="text|json",
    callback=_log_format,
    shell_complete=one_of("text", "json"),
    help="Default: text on a terminal.",
)
"""The option for the form of the log's lines."""

control = click.option(
    "--control",
    metavar="PATH",
    shell_complete=files,
    help="The host's control socket; else $SANDHOST_CONTROL.",
)
"""The option for the host."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
"""Output for programs."""
