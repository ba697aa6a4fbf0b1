"""What ``sandhost fs --help`` says, from the table of its commands."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vfs.fscmd import Command

_GENERAL_OPTIONS = """
options:
  --top-level    use the top-level view of the host's files
  --restricted   use the restricted view (neither: $FSPROXY_TOP_LEVEL says which)
  --             what follows are names
  --help         this text
"""


def general(commands: dict[str, Command]) -> str:
    """Return the help of all."""
    rows = "".join(
        f"  {word:5} {command.usage:8} {command.about}\n"
        for word, command in commands.items()
    )
    return (
        "usage: sandhost fs COMMAND [OPTION]... [NAME]...\n\n"
        "The files that the host keeps for this child.\n\n"
        f"{rows}{_GENERAL_OPTIONS}"
        "\nexample: sandhost fs cat in.txt | sort | sandhost fs put out.txt\n"
        "\nexit status: 0 done, 1 something failed, 2 wrong usage or not in a child\n"
    )


def of_command(word: str, command: Command) -> str:
    """Return the help of one command."""
    option = f"[{command.option}] " if command.option else ""
    return (
        f"usage: sandhost fs {word} {option}{command.usage}\n\n{command.about}\n"
        f"{_GENERAL_OPTIONS}\nexample: {command.example}\n"
    )
