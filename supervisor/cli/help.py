"""``--help`` and ``--version``, printed as reports with the usual failures.

click prints help itself, and a failure of stdout would end as an error of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hostlib.messages import print_text

if TYPE_CHECKING:
    from collections.abc import Callable

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Settings of the program; its commands inherit them."""


COMPLETE = "_SANDHOST_COMPLETE"
"""Set by the script of a shell that asks for completions (click's way)."""


class Command(click.Command):
    """One command."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option ``--help``, which prints as other reports do."""
        return _print_as_report(super().get_help_option(ctx))


class Group(click.Group):
    """A command that has commands."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option ``--help``, which prints as other reports do."""
        return _print_as_report(super().get_help_option(ctx))


def version_option(name: str) -> click.Option:
    """Return the option ``--version`` of a distribution."""
    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_version_printer(name),
        help="Print the version and exit.",
    )


def _version_printer(
    name: str,
) -> Callable[[click.Context, click.Parameter, bool], None]:
    def print_version(
        ctx: click.Context, _option: click.Parameter, value: bool
    ) -> None:
        if not value or ctx.resilient_parsing:
            return
        from importlib.metadata import (  # noqa: PLC0415 - 8 ms, for this option alone
            PackageNotFoundError,
            version,
        )

        try:
            text = version(name)
        except PackageNotFoundError:  # not installed: run from its files
            text = "unknown"
        print_text(f"{name} {text}\n")
        ctx.exit()

    return print_version


def _print_as_report(option: click.Option | None) -> click.Option | None:
    if option is not None:
        option.callback = _print_help
    return option


def _print_help(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print_text(f"{ctx.get_help()}\n")
        ctx.exit()
