"""The commands and their options, as typer sees them.

Rules of this file.

1. It parses and says what is wrong in one line; what a command does stands elsewhere
   and is imported when it is called.
2. What is refused is never ignored: a limit that nobody keeps is worse than none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.cli import daemon as cli_daemon
from supervisor.cli import fds as cli_fds
from supervisor.cli import help as cli_help
from supervisor.cli import observe as cli_observe
from supervisor.cli import tables as cli_tables
from supervisor.cli.check_config import check_config
from supervisor.cli.options import (  # noqa: TC001 - typer reads them at run time
    ControlOf,
    Json,
)
from supervisor.cli.run import run_commands
from supervisor.cli.shim import shim
from supervisor.say import CommandError, UsageFault
from supervisor.say import print_text as _print
from supervisor.say import say as _say

if TYPE_CHECKING:
    from supervisor.launchpad.start import LaunchpadProcess

SPAWNING = frozenset({"run", "pipeline", "relay"})
"""Commands that start children: their statuses below 125 are the children's."""

REFUSED = 125
USAGE = 2

_COMMAND_LINE: Any = {"allow_interspersed_args": False}

app = typer.Typer(
    name="sandhost",
    cls=cli_help.Commands,
    help=cli_help.ABOUT,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


# typer carries a copy of click; the base of its only public error is the way in.
_ParseError: type[Exception] = typer.BadParameter.__mro__[1]

_Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARG]...")]
_Config = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="F", help="TOML file; [policy.run] gives defaults."
    ),
]
_TopLevel = Annotated[
    bool, typer.Option("--top-level", help="May ask for files as the host sees them.")
]
_Root = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", help="Private root; default a fresh one."),
]
_Keep = Annotated[bool, typer.Option("--keep", help="Keep the fresh root.")]
_Read = Annotated[
    list[str] | None,
    typer.Option("--read", metavar="P", help="Grant to read; repeatable."),
]
_Write = Annotated[
    list[str] | None,
    typer.Option("--write", metavar="P", help="Grant to write; repeatable."),
]
_Dialect = Annotated[
    int,
    typer.Option(
        "--dialect", metavar="1|2", min=1, max=2, help="Version of the wire's OPEN."
    ),
]
_Transport = Annotated[
    str, typer.Option("--transport", metavar="socketpair|pipes", help="What FD 3 is.")
]
_Sandbox = Annotated[
    str | None,
    typer.Option(
        "--sandbox",
        metavar="none|auto|required|PROFILE",
        help="Isolation; default auto: all that this machine gives.",
    ),
]
_Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="K=V", help="Set a variable; repeatable."),
]
_PassEnv = Annotated[
    list[str] | None,
    typer.Option("--pass-env", metavar="K", help="Pass a variable on; repeatable."),
]
_Cwd = Annotated[
    str | None, typer.Option("--cwd", metavar="DIR", help="Working directory.")
]
_Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="S", help="End it after S, 0 never; exit 124."),
]
_Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=N,...",
        help="memory, cpu, processes, open_files, bytes, files, file_size, cpus, time.",
    ),
]
_LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="L", help="debug, info, warning, error."),
]
_LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", metavar="text|json", help="Default: text on a terminal."
    ),
]
_Journal = Annotated[
    str | None,
    typer.Option("--journal", metavar="F", help="Append events to a file, JSON lines."),
]
_Control = Annotated[
    str | None,
    typer.Option(
        "--control", metavar="PATH", help="Serve ps, clients, files on a socket."
    ),
]
_Network = Annotated[
    str | None,
    typer.Option(
        "--network", metavar="none|host", help="Default none: no network of its own."
    ),
]


@app.command(
    context_settings=_COMMAND_LINE,
    epilog="Example: sandhost run --root work -- sh -c 'sandhost fs cat note.txt'",
)
def run(  # noqa: PLR0913, PLR0917 - one option each
    ctx: typer.Context,
    command: _Command,
    config: _Config = None,
    top_level: _TopLevel = False,
    root: _Root = None,
    keep: _Keep = False,
    read: _Read = None,
    write: _Write = None,
    dialect: _Dialect = 2,
    transport: _Transport = "socketpair",
    sandbox: _Sandbox = None,
    env: _Env = None,
    pass_env: _PassEnv = None,
    cwd: _Cwd = None,
    timeout: _Timeout = None,
    limit: _Limit = None,
    log_level: _LogLevel = None,
    log_format: _LogFormat = None,
    journal: _Journal = None,
    control: _Control = None,
    network: _Network = None,
) -> int:
    """Run one child behind one door. Exit status: the child's."""
    return run_commands("run", ctx, [command], locals())


@app.command(
    context_settings=_COMMAND_LINE,
    epilog="Example: sandhost pipeline -- cat README.md ::: wc -w",
)
def pipeline(  # noqa: PLR0913, PLR0917
    ctx: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="-- A [ARG]... ::: B [ARG]...")
    ],
    config: _Config = None,
    top_level: _TopLevel = False,
    root: _Root = None,
    keep: _Keep = False,
    read: _Read = None,
    write: _Write = None,
    dialect: _Dialect = 2,
    transport: _Transport = "socketpair",
    sandbox: _Sandbox = None,
    env: _Env = None,
    pass_env: _PassEnv = None,
    cwd: _Cwd = None,
    timeout: _Timeout = None,
    limit: _Limit = None,
    log_level: _LogLevel = None,
    log_format: _LogFormat = None,
    journal: _Journal = None,
    control: _Control = None,
    network: _Network = None,
) -> int:
    """Run children joined stdout to stdin, each with its own door.

    Exit status: that of the last one that failed.
    """
    parts: list[list[str]] = [[]]
    for word in command:
        if word == ":::":
            parts.append([])
        else:
            parts[-1].append(word)
    if not all(parts):
        raise UsageFault("a part of the pipeline is empty")
    return run_commands("pipeline", ctx, parts, locals())


@app.command(
    context_settings=_COMMAND_LINE,
    epilog="Example, inside a child: sandhost relay --read data -- sh worker.sh",
)
def relay(  # noqa: PLR0913, PLR0917 - a command line
    ctx: typer.Context,
    command: _Command,
    read: Annotated[
        list[str] | None,
        typer.Option("--read", metavar="P", help="May read only this; repeatable."),
    ] = None,
    write: Annotated[
        list[str] | None,
        typer.Option("--write", metavar="P", help="May write only this; repeatable."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="May ask only this one.")
    ] = None,
    quota: Annotated[
        float | None,
        typer.Option("--quota", metavar="N", help="May use so many weighted tokens."),
    ] = None,
    fd: Annotated[
        list[str] | None,
        typer.Option(
            "--fd",
            metavar="FD[:LINES]",
            help="Has only this LLM fd, or lines of it; repeatable.",
        ),
    ] = None,
    no_fds: Annotated[
        bool, typer.Option("--no-fds", help="Has none of the LLM fds.")
    ] = False,
) -> int:
    """Inside a child: run a nested child behind a proxy, with at most these rights."""
    fds = tuple(fd or ()) if fd or no_fds else None
    from supervisor.relay import run_nested  # noqa: PLC0415 - needs Trio

    rights: dict[str, object] = {}
    if read or write:
        rights = {"read": read or [], "write": write or []}
    if model is not None:
        rights["model"] = model
    if quota is not None:
        if not 0 <= quota < math.inf:
            raise UsageFault(
                f"--quota: not a number of tokens: {quota}; write 0 or more"
            )
        rights["quota"] = quota
    return run_nested(ctx.obj, tuple(command), rights or None, fds)


cli_help.register(app)
cli_tables.register(app)


@app.command(epilog="Example: sandhost doctor --leaks --control run.sock")
def doctor(
    leaks: Annotated[
        bool, typer.Option("--leaks", help="A host's tables against /proc.")
    ] = False,
    control: ControlOf = None,
    as_json: Json = False,
) -> int:
    """Tell what this machine gives, or what a host has leaked.

    Exit status: 0 nothing found, 1 something found, 2 cannot ask.
    """
    from supervisor.cli.doctor import examine_machine, find_leaks  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415 - one command's

    try:
        if leaks:
            text, status = find_leaks(control, as_text=not as_json)
        else:
            text, status = examine_machine(as_text=not as_json)
    except ControlError as why:
        raise CommandError(str(why)) from None
    _print(text)
    return status


app.command("check-config", epilog="Example: sandhost check-config sandhost.toml")(
    check_config
)
app.command(epilog="Example: sandhost shim bin --tool jq")(shim)


@app.command("fs", context_settings=_COMMAND_LINE)
def fs_command(words: Annotated[list[str] | None, typer.Argument()] = None) -> int:
    """Inside a child: cat, put, ls, stat, cp ... on FD 3."""
    from vfs.fscmd import main as fs_main  # noqa: PLC0415 - never reached by the script

    return fs_main(words or [])


cli_fds.register(app)


@app.command("llm", context_settings=_COMMAND_LINE)
def llm_command(words: Annotated[list[str] | None, typer.Argument()] = None) -> int:
    """Inside a child: chat, quota, config on FD 3."""
    from vfs.llmcmd import main as llm_main  # noqa: PLC0415 - never reached by the script

    return llm_main(words or [])


cli_daemon.register(app)
cli_observe.register(app)


def run_cli(words: list[str], launchpad: LaunchpadProcess | None) -> int:
    """Parse a command line, do it, and return the exit status.

    Args:
        words: without the program's name.
        launchpad: for commands that spawn children; None for others.
    """
    name = words[0] if words and words[0] in app_commands() else ""
    title = f"sandhost {name}".rstrip()
    status = REFUSED if name in SPAWNING else USAGE
    try:
        result = app(
            words or ["--help"],
            standalone_mode=False,
            obj=launchpad,
            prog_name="sandhost",
        )
    except (UsageFault, _ParseError) as why:
        said = getattr(why, "format_message", why.__str__)()
        text = " ".join(said.split()).rstrip(".")
        _say(title, f"{text}; see '{title} --help'")
    except CommandError as why:
        _say(title, str(why))
    except typer.Abort:
        status = 130
    else:
        if words:  # without any it was a question for help, and a mistake
            status = result if isinstance(result, int) else 0
    return status


def app_commands() -> set[str]:
    """Return the names of all commands."""
    return {
        info.name or info.callback.__name__
        for info in app.registered_commands
        if info.callback
    }
