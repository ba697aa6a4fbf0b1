"""How ``--help`` and ``--version`` are printed: as reports, whose failures are told alike.

typer writes help itself, and what its stdout refuses ends as an error of the program.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup

from supervisor.say import print_text

ABOUT = "Host programs that a language model drives: one child, one door."


class Commands(TyperGroup):
    """All commands."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option of the group."""
        return _printing(super().get_help_option(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of that name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _printing(command.get_help_option(ctx))  # the command keeps it
            for param in command.params:
                if isinstance(param, TyperArgument):
                    _worded(param)
        return command


def register(app: typer.Typer) -> None:
    """Add the options that stand before any command."""

    @app.callback()
    def _options(
        *,
        show_version: Annotated[
            bool,
            typer.Option(
                "--version",
                is_eager=True,
                callback=_print_version,
                help="Print the version and exit.",
            ),
        ] = False,
    ) -> None:
        del show_version


def _worded(argument: Any) -> None:
    """Have an argument shown as it is written; typer adds braces, dots and Python's type."""
    name = argument.metavar or argument.name.upper()
    shown = name if argument.required or name.startswith("[") else f"[{name}]"
    told = (name, argument.help) if argument.help else None
    argument.get_usage_pieces = lambda _ctx: [shown]
    argument.get_help_record = lambda _ctx: told


def _print_version(value: bool) -> None:
    if value:
        try:
            text = version("sandhost")
        except PackageNotFoundError:  # run from its files, not installed
            text = "unknown"
        print_text(f"sandhost {text}\n")
        raise typer.Exit


def _printing(option: Any) -> Any:
    option.callback = _print_help
    return option


def _print_help(ctx: Any, _option: object, value: object) -> None:
    if value and not ctx.resilient_parsing:
        print_text(f"{ctx.get_help()}\n")
        ctx.exit()
