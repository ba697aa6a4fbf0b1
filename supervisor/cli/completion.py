"""``sandhost completion``: the script of a shell, and answers to its requests."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from hostlib.messages import UsageFault, print_text
from supervisor.cli.help import COMPLETE, Command
from supervisor.cli.options import one_of

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Command,
    epilog="Example: sandhost completion bash >/etc/bash_completion.d/sandhost",
)
@click.argument("shell", metavar="bash|zsh|fish", shell_complete=one_of(*SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    It completes commands, options, their values, files, and the names of children of
    the daemon that commands find.
    """
    if shell not in SHELLS:
        raise UsageFault(f"no script for {shell!r}; there are: {', '.join(SHELLS)}")
    # The class's own script for bash starts a bash to ask for its version.
    script = ShellComplete.source(_completer(ctx.find_root().command, shell))
    print_text(script)
    return 0


def complete(app: click.Command, instruction: str) -> int:
    """Answer the script of a shell: ``bash_complete`` and the like.

    Args:
        app: the program.
        instruction: the value of ``COMPLETE`` that the script has set.

    Returns:
        The exit status.
    """
    shell, _, verb = instruction.partition("_")
    if shell not in SHELLS or verb != "complete":
        raise UsageFault(f"{COMPLETE}: not of a script of sandhost completion")
    print_text(_completer(app, shell).complete() + "\n")
    return 0


def _completer(app: click.Command, shell: str) -> ShellComplete:
    kind = get_completion_class(shell)
    if kind is None:
        raise RuntimeError(f"click knows no shell {shell!r}, though it did")
    return kind(app, {}, "sandhost", COMPLETE)
