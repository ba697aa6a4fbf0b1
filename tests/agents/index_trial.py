"""An agent installs a package from a granted index, in a world of the test.

    index_trial.py RECIPE PROGRAM DIRECTORY PLACE RULE...

Started by `recipeworld`; PLACE is what that serves. A stand-in leads the agent through
`STEPS`. While the agent waits at the last but one, the host is asked what was refused. Prints
one JSON object.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import trio

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo.provider import serving
from supervisor.llm.recipe import read_recipe
from tests.agents.table import AGENTS
from tests.agents.trial import KEY, TIMEOUT_S, agent_command

SANDHOST = str(Path(sys.executable).with_name("sandhost"))
REFUSED = "https://other.example.com/simple/"
INSTALL = (
    "PIP_CERT={place}/tls-made.pem {pip} install -q --target lib"
    " -i https://index.example.com/simple six"
)
STEPS = (
    {"run": INSTALL},
    {"run": "PYTHONPATH=lib python3 -c 'import six; print(six.SAID)'"},
    {"run": f"curl -sS {REFUSED} 2>&1; curl -sS -m 5 http://203.0.113.5/ 2>&1; true"},
    {"run": f"curl -sS -x http://127.0.0.1:3128 {REFUSED} 2>&1; true"},
    {"run": "touch $HOME/asked; until [ -e $HOME/seen ]; do sleep 0.1; done"},
    "It is installed.",
)


class Found(msgspec.Struct):
    """The result of the agent.

    Attributes:
        network: the output of `sandhost network` while it ran.
        trace: the output of `sandhost trace` then.
        status: its exit status.
        said: all its output.
        asked: all that it sent to the model, as JSON.
        left: steps that it did not ask for.
    """

    network: str = ""
    trace: str = ""
    status: int = -1
    said: str = ""
    asked: str = ""
    left: int = 0


async def main(words: list[str]) -> None:
    """Run the agent, and print what came of it."""
    recipe_name, program, where, place, *rules = words
    top, found = Path(where), Found()
    (agent,) = (one for one in AGENTS if one.name == recipe_name)
    recipe = read_recipe(recipe_name)
    (top / "key").touch(mode=0o600)
    (top / "key").write_text(KEY)
    pip = f"{sys.executable} -m pip"
    async with serving(KEY) as provider:
        text = json.dumps(STEPS).replace("{place}", place).replace("{pip}", pip)
        provider.script = json.loads(text)
        config = top / "llm.toml"
        config.write_text(
            f'[llm]\nendpoint = true\nbase_url = "{provider.url}"\napi = ["chat"]\n'
            f'api_key_file = "{top / "key"}"\n[llm.quota]\nmax_tokens = 20_000_000\n'
        )
        options = ["run", "--recipe", recipe.agent, "--config", str(config)]
        options += ["--workspace", str(top / "work"), "--home", str(top / "home")]
        options += [
            "--control",
            str(top / "control"),
            "--journal",
            str(top / "journal"),
        ]
        options += ["--timeout", str(TIMEOUT_S), "--expose", place]
        for shown in (sys.prefix, sys.base_prefix):
            options += ["--expose", shown]
        for rule in rules:
            options += ["--network", rule]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_look, top, found)
            run = partial(trio.run_process, capture_stdout=True, capture_stderr=True)
            done = await run(
                [SANDHOST, *options, "--", *agent_command(agent, recipe, Path(program))],
                check=False, env=_environment(top), cwd=top,
            )  # fmt: skip
            nursery.cancel_scope.cancel()
        found.status = done.returncode
        found.said = (done.stdout + done.stderr).decode(errors="replace")
        found.asked = json.dumps([one.body for one in provider.served])
        found.left = len(provider.script or ())
    sys.stdout.write(msgspec.json.encode(found).decode())


async def _look(top: Path, found: Found) -> None:
    """Wait until the agent waits; ask the host, and let the agent go on."""
    while not (top / "home" / "asked").exists():  # noqa: ASYNC110 - another process makes it
        await trio.sleep(0.05)
    found.network = await _ask(top, "network", "child-1", "--control", "control")
    found.trace = await _ask(top, "trace", "child-1", "--journal", "journal")
    (top / "home" / "seen").touch()


async def _ask(top: Path, *words: str) -> str:
    done = await trio.run_process(
        [SANDHOST, *words], capture_stdout=True, env=_environment(top), cwd=top
    )
    return done.stdout.decode()


def _environment(top: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(top),
        "LANG": "C.UTF-8",
        "TMPDIR": os.environ["TMPDIR"],
        "SANDHOST_STATE": str(top / "state"),
    }


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
