"""Recipes: what an agent needs to run behind the host's doors, as data.

Each is a file of ``recipes/``.  Its texts hold places such as ``${OPENAI_BASE_URL}``,
which the host fills in when the child starts (``supervisor/children/environment.py``).
``docs/reference/agents.md`` has the table of them, and ``tests/agents`` runs each.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

DIRECTORY = os.path.join(os.path.dirname(__file__), "recipes")  # noqa: PTH118, PTH120 - text
HOME = "~/"

_SUFFIX = ".toml"


class RecipeError(Exception):
    """There is no such recipe, or no way to run that agent; the text says why."""


class Off(msgspec.Struct, forbid_unknown_fields=True):
    """How an agent's own sandbox, telemetry and updates are switched off."""

    own_sandbox: str
    telemetry: str
    update: str


class Tried(msgspec.Struct, forbid_unknown_fields=True):
    """What an agent did when it was tried: ``yes``, ``no`` or in part.

    Attributes:
        as_user: how that went behind a host of an ordinary user.
    """

    starts: str
    reaches: str
    edits: str
    tests: str
    as_user: str = "not tried"


class Recipe(msgspec.Struct, forbid_unknown_fields=True):
    """What one agent needs.

    Attributes:
        agent: its name.
        version_tried: the newest that was run; empty where none was.
        command: program and arguments; ``TASK`` stands for what a user asks.
        env: variables of the child.
        files: texts by path; each path begins with ``~/``.
        off: how what it does of its own accord is switched off.
        expose: paths that it has to see beside COMMAND's own installation.
        limits: what does not work, or not as outside.
        packages: what is installed, by registry.
        llm: values of ``[llm]`` that it needs.
        tried: what it did; None where it cannot be run.
        reason: why it cannot be run; empty where it can.
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
    tried: Tried | None = None
    reason: str = ""

    def shown(self) -> dict[str, Any]:
        """Return what a program reads of it."""
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
    """Return the agents that there is a recipe of, or a reason why there is none."""
    found = os.listdir(DIRECTORY)  # noqa: PTH208 - text
    return sorted(name.removesuffix(_SUFFIX) for name in found if _SUFFIX in name)


def read_recipe(agent: str) -> Recipe:
    """Return the recipe of an agent.

    Raises:
        RecipeError: there is none.
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
        RecipeError: there is none, or no way to run that agent.
    """
    recipe = read_recipe(agent)
    if recipe.reason:
        raise RecipeError(
            f"cannot run {agent} behind the host's doors: {recipe.reason}"
        )
    return recipe
