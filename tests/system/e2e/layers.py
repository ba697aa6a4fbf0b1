"""The layers that this machine gives a child, as `sandhost doctor` tells of them."""

import json
from pathlib import Path

from supervisor.sandbox.plan import LAYERS
from tests.helpers.command import sandhost
from tests.helpers.steps import Steps, ending

TABLE = """
import json
from supervisor.cli.doctor_layers import rows, try_layers
print(json.dumps({"layers": rows(*try_layers())}))
"""
"""The layers of `doctor --json`, without its trials of workspaces."""


def layers(wrapper: tuple[str, ...] | None = None) -> dict[str, dict[str, str]]:
    """Return doctor's table, by layer.

    Args:
        wrapper: words before it; `()` for the command itself, which says more.
    """
    if wrapper is None or isinstance(wrapper, Steps):
        outcome = sandhost(wrapper=ending(wrapper, TABLE))
    else:
        outcome = sandhost("doctor", "--json", wrapper=wrapper)
    assert outcome.err == b""
    return {row["layer"]: row for row in json.loads(outcome.out)["layers"]}


def present(table: dict[str, dict[str, str]]) -> set[str]:
    """Return the layers that are there."""
    return {layer for layer, row in table.items() if row["state"] == "present"}


def as_root(where: Path) -> tuple[str | Path, ...]:
    """Return options of `run` for a child that stays root; others' are as ever."""
    config = where / "as-root.toml"
    names = sorted(LAYERS.keys() - {"uid"})
    config.write_text(f"[sandbox.as-root]\nlayers = {names}\n")
    return "--config", config, "--sandbox", "as-root"
