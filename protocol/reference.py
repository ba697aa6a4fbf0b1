"""The generated parts of the protocol's page: ``python -m protocol.reference``.

    python -m protocol.reference [--check] [FILE]

Writes the table of commands and the table of limits between their marker comments in
FILE (``docs/reference/protocol.md`` of this project where none is named).  With
``--check`` it only compares, and exits with 1 if the page differs from the code; 2 means
that the arguments or the file cannot be used.

The package does not import this module, so that no child loads it.
"""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol import limits
from protocol.commands import COMMANDS

PACKAGE = Path(__file__).resolve().parent
PAGE = PACKAGE.parent / "docs" / "reference" / "protocol.md"
USAGE = "usage: python -m protocol.reference [--check] [FILE]\n"


def describe_commands() -> str:
    """Return the reference of all commands as a Markdown table."""
    rows = [
        "| request line | payload | reply | does | wrong number of parameters |",
        "|---|---|---|---|---|",
    ]
    replies = {
        "empty": "`OK`",
        "number": "`OK n`",
        "body": "`OK n` + n bytes",
        "text": "`OK TEXT`",
        "chat": "`OK n STATUS` + n bytes",
    }
    for row in COMMANDS.values():
        names = [f"[{p}]" if kind == "optional" else p for kind, p in row.params]
        line = " ".join([row.word.decode(), *names])
        requires = row.requires.decode().rstrip()
        cells = (
            f"`{line}`",
            row.payload,
            replies[row.reply],
            row.about,
            f"`{requires}`",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def describe_limits() -> str:
    """Return every bound of ``protocol.limits`` as a Markdown table.

    A reason is the text that follows its bound in the source, so the source is read.
    """
    body = ast.parse((PACKAGE / "limits.py").read_text(encoding="utf-8")).body
    rows = ["| limit | value | what it bounds, and why |", "|---|---|---|"]
    for bound, text in zip(body[1::2], body[2::2], strict=True):
        name = ast.unparse(bound).partition(" ")[0]
        reason = " ".join(str(ast.literal_eval(ast.unparse(text))).split())
        rows.append(f"| `{name}` | {vars(limits)[name]:,} | {reason} |")
    return "\n".join(rows) + "\n"


PARTS = {"commands": describe_commands, "limits": describe_limits}
"""The functions that make the generated parts, by the word in their markers."""


def renew(text: str) -> str:
    """Return a page with its generated parts made anew from the code.

    Raises:
        ValueError: the two markers of a part do not stand in the page once each.
    """
    for word, describe_part in PARTS.items():
        begin = f"<!-- generated: {word} -->\n"
        end = f"<!-- end of generated: {word} -->\n"
        head, begun, rest = text.partition(begin)
        _, ended, tail = rest.partition(end)
        if not (begun and ended) or begin in tail or end in head + tail:
            raise ValueError(f"it needs {begin.strip()} and {end.strip()}, once each")
        text = head + begin + "\n" + describe_part() + "\n" + end + tail
    return text


def main(arguments: Sequence[str]) -> int:
    """Renew a page, or with ``--check`` only compare it; return the exit status."""
    check = "--check" in arguments
    names = [argument for argument in arguments if argument != "--check"]
    if len(names) > 1 or any(name.startswith("-") for name in names):
        sys.stderr.write(USAGE)
        return 2
    page = Path(names[0]) if names else PAGE
    try:
        old = page.read_text(encoding="utf-8")
        new = renew(old)
        if not check:
            page.write_text(new, encoding="utf-8")
    except (OSError, ValueError) as why:
        sys.stderr.write(f"cannot renew the reference in {page}: {why}\n")
        return 2
    if check and new != old:
        sys.stderr.write(
            f"{page} is stale: run `python -m protocol.reference` and commit it\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
