"""The environment and HOME of a child: variables of services, recipes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from supervisor.fsproxy.ports import KEYS, is_withheld
from supervisor.sandbox import refusals
from supervisor.sandbox.home import fill_home

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.spec import ChildSpec

PLACES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "HOME")
"""Variables of the child that a text may name, as ``${NAME}``."""

_PLACE = re.compile(r"\$\{(" + "|".join(PLACES) + r")\}")

_HOME_IS_FULL = (
    "The recipe's files are not written, for HOME has entries already; name an"
    " empty directory, or keep them with a fixed [llm] endpoint_port"
)


class MissingPlaceError(Exception):
    """The child has no such variable; the argument is its name."""


def fill(text: str, env: Mapping[str, str]) -> str:
    """Return a text with a child's variables put in; every other ``$`` stays.

    Raises:
        MissingPlaceError: the child does not have one of them.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in env:
            raise MissingPlaceError(name)
        return env[name]

    return _PLACE.sub(value, text)


def add_offered(
    env: dict[str, str], offered: Mapping[str, str], spec: ChildSpec
) -> Iterator[str]:
    """Add the variables of a service that the child does not have; yield warnings.

    A key is left out if the child has an address of its own: it would send the key there.
    """
    own = spec.own_env
    for name, value in offered.items():
        if name in own:
            key = KEYS.get(name)
            is_keyless = key is not None and key not in own
            without = f", and {key} is not set" if is_keyless else ""
            yield (
                f"{name} is as --env or [child] env has it{without}; leave it out"
                " there to have the host's own"
            )
        elif is_withheld(name, own):
            env.pop(name, None)  # nor a variable that was only passed on
        else:
            env[name] = value


def fill_in_recipe(env: dict[str, str], spec: ChildSpec) -> Iterator[str]:
    """Fill in a recipe's variables, write HOME's first entries; yield warnings.

    Raises:
        SpawnError: a service that the recipe needs is missing.
        OSError: HOME cannot be written.
    """
    try:
        found = {name: fill(text, env) for name, text in spec.template_env.items()}
        files = {n: fill(text, env) for n, text in spec.template_files.items()}
    except MissingPlaceError as name:
        raise refusals.no_place(str(name)) from None
    env.update(found)
    files.update(spec.home_files)
    home = spec.kept_home or spec.home_dir
    if home is not None and not fill_home(home, files) and spec.template_files:
        yield _HOME_IS_FULL
