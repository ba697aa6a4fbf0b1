"""Options that several commands share, worded once."""

from __future__ import annotations

from typing import Annotated

import typer

ControlOf = Annotated[
    str | None,
    typer.Option(
        "--control",
        metavar="PATH",
        help="The host's control socket; else $SANDHOST_CONTROL.",
    ),
]
"""Which host is asked."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""Output for programs."""
