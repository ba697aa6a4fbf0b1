"""How ``--help`` is printed: as any report, so that what fails in it is said as there.

typer writes it itself, and what its stdout refuses ends as an error of the program.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from supervisor.say import print_text


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
        return command


def _printing(option: Any) -> Any:
    option.callback = _print_help
    return option


def _print_help(ctx: Any, _option: object, value: object) -> None:
    if value and not ctx.resilient_parsing:
        print_text(f"{ctx.get_help()}\n")
        ctx.exit()
