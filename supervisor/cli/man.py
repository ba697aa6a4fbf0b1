"""``sandhost man``: manual pages, made from the commands themselves.

One page for the program and one for each command, in man(7)'s macros.
"""

from __future__ import annotations

import inspect
import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import click

from hostlib.messages import CommandError, print_text, remedy
from supervisor.cli.app import ABOUT, COMMANDS, app
from supervisor.cli.child_commands import ChildCommand
from supervisor.cli.help import Command
from supervisor.cli.options import directories

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENVIRONMENT = (
    ("SANDHOST_CONTROL", "The control socket of the host that commands ask."),
    ("COLUMNS", "The width of tables on a terminal."),
    ("NO_COLOR", "Tables are drawn without colours."),
    ("SANDHOST_TRACEBACK", "An internal error is reported with its traceback."),
)
_STATUSES = (
    ("0", "Done; of run, pipeline and relay: that of the child."),
    ("1", "Something failed, or was found."),
    ("2", "Wrong usage, or no host answered."),
    ("124", "The time of run was up."),
    ("125", "The host failed or refused."),
    ("126, 127", "The child's program cannot be executed, or was not found."),
)


@click.command(cls=Command, epilog="Example: sandhost man /usr/local/share/man/man1")
@click.argument("directory", metavar="DIR", shell_complete=directories)
@click.pass_context
def man(ctx: click.Context, directory: str) -> int:
    """Write the manual pages into a directory.

    It is made if it is not there. man(1) finds them in a directory man1 of its path.
    """
    try:
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - a str throughout
        written = 0
        for name, text in pages(ctx.find_root()):
            path = f"{directory}/{name}"
            with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
                file.write(text)
            written += 1
    except OSError as why:
        path = why.filename or directory
        raise CommandError(
            f"cannot write {path!r}: {why.strerror}{remedy(why)}"
        ) from None
    print_text(f"{written} pages in {directory}\n")
    return 0


def pages(root: click.Context) -> Iterator[tuple[str, str]]:
    """Yield (name of the file, text) of each page.

    Args:
        root: the context of the program.
    """
    yield "sandhost.1", _program_page(root)
    for entries in COMMANDS.values():
        for name, entry in entries.items():
            command = app.get_command(root, name)
            if command is not None:
                ctx = click.Context(command, parent=root, info_name=name)
                yield f"sandhost-{name}.1", _command_page(ctx, entry.help)


def _program_page(root: click.Context) -> str:
    lines = [
        *_head("sandhost", ABOUT),
        *_section("SYNOPSIS"),
        f"{_bold('sandhost')} {_text('COMMAND [ARG]...')}",
        *_section("COMMANDS"),
    ]
    for group, entries in COMMANDS.items():
        lines.append(f".SS {_text(group)}")
        for name, entry in entries.items():
            lines += _item(_bold(f"sandhost-{name}") + "(1)", entry.help)
    lines += _section("OPTIONS")
    lines += _options(root)
    lines += _section("ENVIRONMENT")
    for name, about in _ENVIRONMENT:
        lines += _item(_bold(name), about)
    lines += _section("EXIT STATUS")
    for status, about in _STATUSES:
        lines += _item(_bold(status), about)
    return "\n".join(lines) + "\n"


def _subcommands(ctx: click.Context, group: click.Group) -> list[str]:
    """Return the commands of a command, each with its options."""
    lines = []
    for name, command in group.commands.items():
        inner = click.Context(command, parent=ctx, info_name=name)
        lines += _section(name.upper())
        lines.append(
            f"{_bold(inner.command_path)} {_text(' '.join(command.collect_usage_pieces(inner)))}"
        )
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            lines += [".PP", _text(" ".join(paragraph.split()))]
        lines += _options(inner)
    return lines


def _command_page(ctx: click.Context, about: str) -> str:
    command = ctx.command
    lines = _head(f"sandhost-{ctx.info_name}", about)
    if isinstance(command, ChildCommand):
        lines += _section("DESCRIPTION")
        lines += [".nf", *map(_text, command.get_help(ctx).splitlines()), ".fi"]
        return "\n".join([*lines, *_see_also()]) + "\n"
    words = " ".join(command.collect_usage_pieces(ctx))
    lines += _section("SYNOPSIS")
    lines.append(f"{_bold(ctx.command_path)} {_text(words)}")
    lines += _section("DESCRIPTION")
    for number, paragraph in enumerate(
        inspect.cleandoc(command.help or "").split("\n\n")
    ):
        lines += [".PP"] * (number > 0)
        lines.append(_text(" ".join(paragraph.split())))
    lines += _section("OPTIONS")
    lines += _options(ctx)
    if isinstance(command, click.Group):
        lines += _subcommands(ctx, command)
    if command.epilog:
        where, _, example = command.epilog.partition(": ")
        lines += _section("EXAMPLE")
        if "," in where:  # "Example, inside a child"
            lines += [_text(where.partition(", ")[2].capitalize() + ":"), ".PP"]
        lines += [".nf", _text(example), ".fi"]
    return "\n".join([*lines, *_see_also()]) + "\n"


def _options(ctx: click.Context) -> Iterator[str]:
    for param in ctx.command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and all(record):  # an argument may have no help
            yield from _item(_bold(record[0]), record[1])


# Macros of man(7)


def _head(name: str, about: str) -> list[str]:
    try:
        release = version("sandhost")
    except PackageNotFoundError:  # not installed: run from its files
        release = "unknown"
    return [
        f'.TH {name.upper()} 1 "" "sandhost {release}" "sandhost"',
        *_section("NAME"),
        f"{_text(name)} \\- {_text(about.rstrip('.'))}",
    ]


def _section(title: str) -> list[str]:
    return [f".SH {title}"]


def _item(head: str, text: str) -> list[str]:
    return [".TP", head, _text(text)]


def _see_also() -> list[str]:
    return [*_section("SEE ALSO"), f"{_bold('sandhost')}(1)"]


def _bold(text: str) -> str:
    return f"\\fB{_text(text)}\\fR"


def _text(text: str) -> str:
    """Return text escaped for roff."""
    quoted = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{quoted}" if quoted.startswith((".", "'")) else quoted
