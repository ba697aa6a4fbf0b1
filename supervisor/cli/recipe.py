"""``sandhost recipe``: the needs of an agent, for people, programs and shells."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import click

from hostlib.messages import CommandError, UsageFault, print_text
from supervisor.cli.help import Command
from supervisor.cli.options import agents
from supervisor.cli.options import as_json as json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llm.recipe import Recipe

END = "END_OF_RECIPE"


@click.command(cls=Command, epilog="Example: sandhost recipe codex")
@click.argument("agent", metavar="AGENT", shell_complete=agents)
@json_option
@click.option("--shell", "as_shell", is_flag=True, help="Print a script for sh.")
def recipe(agent: str, *, as_json: bool, as_shell: bool) -> int:
    """Print what an agent needs to ask the model by the host.

    'sandhost run --recipe AGENT' applies it. The script of --shell does so inside a
    child.
    """
    if as_json and as_shell:
        raise UsageFault("--json and --shell: leave one out")
    from supervisor.llm.recipe import RecipeError, usable_recipe  # noqa: PLC0415 - reads

    try:
        found = usable_recipe(agent)
    except RecipeError as why:
        raise CommandError(str(why)) from None
    if as_json:
        print_text(json.dumps(found.row(), indent=2) + "\n")
    else:
        lines = script_of(found) if as_shell else _page(found)
        print_text("\n".join(lines) + "\n")
    return 0


def _page(recipe: Recipe) -> Iterator[str]:
    tried = recipe.version_tried
    yield f"{recipe.agent}, tried as {tried}" if tried else f"{recipe.agent}, not tried"
    yield from _part("command", shlex.join(recipe.command))
    named = [f"{name}={text}" for name, text in recipe.env.items()]
    yield from _part("environment", *named)
    for path, text in recipe.files.items():
        yield from _part(f"file {path}", *text.splitlines())
    if recipe.off is not None:
        off = recipe.off
        yield from _part(
            "switched off",
            f"own sandbox: {off.own_sandbox}",
            f"telemetry: {off.telemetry}",
            f"update: {off.update}",
        )
    yield from _part("exposed", *recipe.expose)
    yield from _part("[llm]", *(f"{key} = {v!r}" for key, v in recipe.llm.items()))
    yield from _part("limits", recipe.limits)


def _part(title: str, *lines: str) -> Iterator[str]:
    if any(lines):
        yield f"{title}:"
        yield from (f"  {line}".rstrip() for line in lines)


def script_of(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of a script for sh that applies a recipe."""
    yield f"# {recipe.agent}: then {shlex.join(recipe.command)}".replace("\n", "; ")
    for name, text in recipe.env.items():
        quoted = _quote(text).replace('"', '\\"')
        yield f'export {name}="{quoted}"'
    for name, text in recipe.home_files.items():
        directory, _, _ = name.rpartition("/")
        if directory:
            yield f'mkdir -p "$HOME"/{shlex.quote(directory)}'
        yield f'cat > "$HOME"/{shlex.quote(name)} <<{END}'
        yield _quote(text).removesuffix("\n")
        yield END


def _quote(text: str) -> str:
    """Return a text in which a shell expands only the recipe's places."""
    from supervisor.children.environment import PLACES  # noqa: PLC0415 - for a script only

    place = "|".join(PLACES)
    return re.sub(rf"[\\`]|\$(?!\{{(?:{place})\}})", r"\\\g<0>", text)
