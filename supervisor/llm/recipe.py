"""Recipes for agents: their command, environment, files and settings, as data.

Each is a file of ``recipes/``.  Its texts hold variables such as ``${OPENAI_BASE_URL}``,
which the host fills in when the child starts (``supervisor/children/environment.py``).
``docs/reference/agents.md`` has a table of them, and ``tests/agents`` runs each.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

DIRECTORY = os.path.join(os.path.dirname(__file__), "recipes")  # noqa: PTH118, PTH120 - text
HOME = "~/"

_SUFFIX = ".toml"


class RecipeError(Exception):
    """There is no such recipe, or the agent cannot be run; the text says why."""


class Off(msgspec.Struct, forbid_unknown_fields=True):
    """How to switch off an agent's own sandbox, telemetry and updates."""

    own_sandbox: str
    telemetry: str
    update: str


class TrialResults(msgspec.Struct, forbid_unknown_fields=True):
    """The results of trying an agent: ``yes``, ``no`` or in part.

    Attributes:
        as_user: the result with a host of an ordinary user.
    """

    starts: str
    reaches: str
    edits: str
    tests: str
    as_user: str = "not tried"


class Recipe(msgspec.Struct, forbid_unknown_fields=True):
    """The recipe of one agent.

    Attributes:
        agent: its name.
        version_tried: the newest version that was run; empty for none.
        command: program and arguments; ``TASK`` is replaced by the user's task.
        env: variables of the child.
        files: texts by path; each path begins with ``~/``.
        off: how to switch off its own sandbox, telemetry and updates.
        expose: paths that it must see beside COMMAND's own installation.
        limits: features that do not work, or differ from outside.
        packages: packages to install, by registry.
        llm: values of ``[llm]`` that it needs.
        tried: results; None if it cannot be run.
        reason: why it cannot be run; empty if it can.
    """

    agent: str
    version_tried: str = ""
    command: list[str] = []
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    off: Off | None = None
    expose: list[str] = []
    limits: str = ""
    packages: dict[str, list[str]] = {}
    llm: dict[str, int | str] = {}
    tried: TrialResults | None = None
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """Return the recipe as a JSON object."""
        names = (
            "agent", "version_tried", "command", "env", "files", "off", "expose",
            "limits",
        )  # fmt: skip
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {name: plain[name] for name in names}

    @property
    def home_files(self) -> dict[str, str]:
        """Its files by their names within HOME."""
        return {path.removeprefix(HOME): text for path, text in self.files.items()}


def recipe_names() -> list[str]:
    """Return the agents with a recipe, or with a reason why there is none."""
    found = os.listdir(DIRECTORY)  # noqa: PTH208 - text
    return sorted(name.removesuffix(_SUFFIX) for name in found if _SUFFIX in name)


def read_recipe(agent: str) -> Recipe:
    """Return the recipe of an agent.

    Raises:
        RecipeError: there is no such recipe.
    """
    known = recipe_names()
    if agent not in known:
        raise RecipeError(f"no recipe of {agent!r}; known: {', '.join(known)}")
    path = os.path.join(DIRECTORY, agent + _SUFFIX)  # noqa: PTH118 - text
    with open(path, "rb") as file:  # noqa: PTH123 - text
        return msgspec.toml.decode(file.read(), type=Recipe)


def usable_recipe(agent: str) -> Recipe:
    """Return the recipe of an agent that can be run.

    Raises:
        RecipeError: there is no such recipe, or the agent cannot be run.
    """
    recipe = read_recipe(agent)
    if recipe.reason:
        raise RecipeError(f"cannot run {agent} with the host's model: {recipe.reason}")
    return recipe
