"""What a log says of a ToolExec request: its arguments, without what may be a secret.

Rule of this file: where a secret ends depends on who reads it, in a script on its quotes;
so what follows a word that announces one is left out to the end of its argument.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from protocol.toolexec.requests import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

# A word that a secret follows, what may stand between, and all the rest.
_SECRET = re.compile(
    r"((?:(?<![\w-])--?(?:token|password|api[-_]?key|key)(?![\w-])|bearer(?![a-z]))"
    r"[\s=:,\"']*)(.*)",
    re.IGNORECASE | re.DOTALL,
)
# Long enough to be a child's token, or the MAC of a narrowed one.
_TOKEN = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}", re.IGNORECASE)


def redacted(args: Sequence[bytes]) -> str:
    """Return arguments for a log line, without what may be a secret.

    Left out is what follows ``--token``, ``--password``, ``--api-key``, ``--key`` and
    ``Bearer``: the rest of the argument, wherever in it that begins, or the next argument
    if there is no rest. So is what has the shape of a token.
    """
    found: list[str] = []
    hidden = False
    for arg in args:
        text = arg.decode("utf-8", "surrogateescape")
        secret = _SECRET.search(text)
        is_next = secret is not None and not secret[2]
        if hidden:
            # What stands for the secret of another word may be such a word itself.
            hidden = is_next or not text.strip()
            text = "***"
        elif secret is not None:
            hidden = is_next
            text = text[: secret.end(1)] + ("" if hidden else "***")
        found.append(shown(_TOKEN.sub("***", text)))
    return " ".join(found)
