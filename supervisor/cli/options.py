"""Options that several commands share, worded once, and the words that a shell completes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    Completer = Callable[[click.Context, click.Parameter, str], list[Any]]

COMMAND_LINE: dict[str, Any] = {"allow_interspersed_args": False}
"""Settings of a command whose last words are a command line of their own."""

INSIDE: dict[str, Any] = {**COMMAND_LINE, "ignore_unknown_options": True}
"""Settings of a command that reads all of its words itself."""


def one_of(*words: str) -> Completer:
    """Return a completer of fixed words."""

    def complete(_ctx: object, _param: object, incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def files(_ctx: object, _param: object, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the name of a file."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells only

    return [CompletionItem(incomplete, type="file")]


def directories(_ctx: object, _param: object, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete the name of a directory."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells only

    return [CompletionItem(incomplete, type="dir")]


control = click.option(
    "--control",
    metavar="PATH",
    shell_complete=files,
    help="The host's control socket; else $SANDHOST_CONTROL.",
)
"""Which host is asked."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
"""Output for programs."""
