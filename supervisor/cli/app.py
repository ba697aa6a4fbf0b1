"""The program ``sandhost``: its table of commands, and the run of a command line.

Rules of this file.

1. A command's module is imported when the command is called, and no other's. The help
   of the program is printed from the table alone.
2. A fault of a command line is reported in one line on stderr.
3. A refused option is never ignored: a limit that is not kept is worse than none.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import click

from hostlib.messages import CommandError, ReaderGone, UsageFault, print_stderr
from supervisor.cli.help import COMPLETE, HELP_OPTIONS, Group, version_option

if TYPE_CHECKING:
    from supervisor.spawn.launchpad.start import LaunchpadProcess

SPAWNING = frozenset({"run", "pipeline", "relay"})
"""Commands that start children: their statuses below 125 are the children's."""

REFUSED = 125
USAGE = 2

ABOUT = "Host programs that a language model drives: one child, one door."


class CommandEntry(NamedTuple):
    """A command of the table.

    Attributes:
        module: of ``supervisor.cli``; it has the command by its own name.
        help: the first line of its help.
    """

    module: str
    help: str


COMMANDS: dict[str, dict[str, CommandEntry]] = {
    "Run": {
        "run": CommandEntry("run", "Run one child behind one door."),
        "pipeline": CommandEntry(
            "run", "Run children joined stdout to stdin, each with its own door."
        ),
        "shim": CommandEntry("shim", "Install commands that run the host's tools."),
        "recipe": CommandEntry(
            "recipe", "Print what an agent needs to ask the model by the host."
        ),
    },
    "Inside a child": {
        "relay": CommandEntry("relay", "Run a nested child with at most these rights."),
        "fs": CommandEntry(
            "child_commands", "Read and write files: cat, put, ls, stat, cp ..."
        ),
        "llm": CommandEntry("child_commands", "Ask the model: chat, quota, config."),
        "fd": CommandEntry(
            "child_commands", "Page through large contents: read, search, wrap ..."
        ),
        "mcp": CommandEntry(
            "fds", "Serve LLM fds to an MCP client on stdin and stdout."
        ),
    },
    "Workspaces": {
        "workspace": CommandEntry(
            "workspace", "Look at changes; commit or discard them."
        ),
    },
    "Daemon": {
        "serve": CommandEntry("serve", "Be the daemon: keep the configured children."),
        "spawn": CommandEntry("daemon", "Start a child in the daemon."),
        "ps": CommandEntry("tables", "List the children of a host."),
        "clients": CommandEntry(
            "tables", "List the clients of a host, nested ones included."
        ),
        "files": CommandEntry("tables", "List the files that clients have open."),
        "quota": CommandEntry("tables", "List what clients have spent on the model."),
        "network": CommandEntry(
            "network", "Tell what a child has reached; change its rules."
        ),
        "logs": CommandEntry("daemon", "Print what a child said."),
        "events": CommandEntry(
            "daemon", "Print the journal as it is written, JSON lines."
        ),
        "stats": CommandEntry("daemon", "Print figures of the daemon itself."),
        "kill": CommandEntry(
            "daemon", "Signal a child; its restart policy decides the rest."
        ),
        "stop": CommandEntry("daemon", "Stop children for good, or the daemon."),
        "reload": CommandEntry(
            "daemon", "Have the daemon read its configuration anew."
        ),
    },
    "Fleet": {
        "fleet": CommandEntry("fleet", "Run children on many machines."),
    },
    "Diagnose": {
        "check-config": CommandEntry(
            "check_config", "Tell every fault of a configuration."
        ),
        "doctor": CommandEntry("doctor", "Tell what this machine gives, or lacks."),
        "top": CommandEntry("observe", "Show what each child does now."),
        "trace": CommandEntry("observe", "Print what a client did, in order."),
    },
    "Set up": {
        "completion": CommandEntry(
            "completion", "Print the completion script of a shell."
        ),
        "man": CommandEntry("man", "Write the manual pages into a directory."),
    },
}
"""The commands by group, as ``--help`` shows them."""

ALIASES = {"ws": "workspace"}
"""Shorter names of commands."""


class CommandGroup(Group):
    """All commands, each imported when it is asked for."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return [name for entries in COMMANDS.values() for name in entries]

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        for entries in COMMANDS.values():
            if cmd_name in entries:
                module = import_module(f"supervisor.cli.{entries[cmd_name].module}")
                command = getattr(module, cmd_name.replace("-", "_"))
                assert isinstance(command, click.Command)  # noqa: S101 - by the table
                return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of some words, and the words behind its name."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand:
            names = self.list_commands(ctx)
            raise click.NoSuchCommand(args[0], possibilities=names, ctx=ctx) from None

    def format_commands(
        self, _ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the commands by group; no module is imported for it."""
        widest = max(map(len, self.list_commands(_ctx)))
        for group, entries in COMMANDS.items():
            with formatter.section(group):
                formatter.write_dl(
                    [
                        (name.ljust(widest), entry.help)
                        for name, entry in entries.items()
                    ]
                )


app = CommandGroup(
    "sandhost",
    help=ABOUT,
    epilog="'sandhost COMMAND --help' tells a command's options, with an example.",
    context_settings=HELP_OPTIONS,
    params=[version_option("sandhost")],
    subcommand_metavar="COMMAND [ARG]...",
)


def run_cli(words: list[str], launchpad: LaunchpadProcess | None) -> int:
    """Do a command line; return the exit status.

    Args:
        words: without the program's name.
        launchpad: for commands that spawn children; None for others.
    """
    asked = ALIASES.get(words[0], words[0]) if words else ""
    name = asked if any(asked in of for of in COMMANDS.values()) else ""
    title = f"sandhost {name}".rstrip()
    status = REFUSED if name in SPAWNING else USAGE
    try:
        if not words and COMPLETE in os.environ:
            from supervisor.cli.completion import complete  # noqa: PLC0415 - for shells

            return complete(app, os.environ[COMPLETE])
        result = _invoke(words or ["--help"], launchpad)
    except (UsageFault, click.ClickException) as why:
        said = why.format_message() if isinstance(why, click.ClickException) else why
        text = " ".join(str(said).split()).rstrip(".")
        print_stderr(title, f"{text}; see '{title} --help'")
        if isinstance(why, UsageFault) and why.status is not None:
            status = why.status
    except CommandError as why:
        print_stderr(title, str(why))
        status = status if why.status is None else why.status
    except ReaderGone:
        status = 0
    else:
        if words:  # without words it was a question for help, and a mistake
            status = result
    return status


def _invoke(words: list[str], launchpad: LaunchpadProcess | None) -> int:
    try:
        with app.make_context("sandhost", [*words], obj=launchpad) as context:
            result = app.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    return result if isinstance(result, int) else 0
