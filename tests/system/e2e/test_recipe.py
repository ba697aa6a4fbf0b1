"""Recipes: what is printed of them, and what a child finds that is run by one."""

import json
import os
import re
import subprocess
from pathlib import Path

import click
import pytest

from supervisor.children.environment import PLACES
from supervisor.cli.recipe import recipe, script_of
from supervisor.cli.run import apply_recipe, run
from supervisor.config.loader import load_config
from supervisor.llm.recipe import Recipe, read_recipe, recipe_names
from supervisor.llm.section import LlmSection
from supervisor.sandbox.home import is_home_file
from tests.helpers.command import Outcome, sandhost

pytestmark = pytest.mark.slow

KEYS = [
    "agent", "version_tried", "command", "env", "files", "off", "expose", "limits",
]  # fmt: skip
WANTED = {
    *(
        "codex",
        "claude",
        "claude-agent-sdk",
        "opencode",
        "aider",
        "mini-swe-agent",
        "qwen",
        "gemini",
        "llm",
    ),
    *("goose", "openai-agents", "pydantic-ai", "langgraph", "smolagents"),
}
WITHOUT = {"gemini", "goose"}
"""Agents that have no way; their recipes say why."""

NAMES = recipe_names()
USABLE = [name for name in NAMES if name not in WITHOUT]


def test_there_is_a_recipe_of_each_agent() -> None:
    assert set(NAMES) >= WANTED
    for name in NAMES:
        found = read_recipe(name)
        assert found.agent == name
        assert bool(found.reason) is (name in WITHOUT)


@pytest.mark.parametrize("name", USABLE)
def test_a_recipe_is_whole(name: str) -> None:
    found = read_recipe(name)
    assert found.version_tried
    assert found.limits
    assert found.packages
    assert found.tried is not None
    assert all(found.row()["off"].values())
    assert "TASK" in found.command
    assert set(found.llm) <= set(LlmSection.__struct_fields__)
    for path in found.files:
        assert path.startswith("~/")
        assert is_home_file(path.removeprefix("~/"))
    texts = "".join((*found.env.values(), *found.files.values()))
    places = set(re.findall(r"\$\{(\w+)\}", texts))
    assert places <= set(PLACES)
    # An agent that asks by another way would not be refused where there is no door.
    assert places & {"OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"}


@pytest.mark.slow
def test_a_recipe_is_printed_for_programs() -> None:
    outcome = sandhost("recipe", "codex", "--json")
    assert outcome.status == 0
    shown = json.loads(outcome.out)
    assert list(shown) == KEYS
    assert "${OPENAI_BASE_URL}" in shown["files"]["~/.codex/config.toml"]
    assert set(shown["off"]) == {"own_sandbox", "telemetry", "update"}


@pytest.mark.slow
def test_an_agent_without_a_recipe_is_told() -> None:
    unknown = sandhost("recipe", "codec")
    assert unknown.status == 2
    assert all(name in unknown.err.decode() for name in NAMES)
    assert sandhost("recipe", "gemini").said("Google's own API alone")
    outcome = sandhost("run", "--recipe", "codec", "--", "true")
    assert outcome.status == 125
    assert "no recipe of 'codec'; known: aider" in outcome.err.decode()


def configured(where: Path, policy: str = "") -> str:
    """Write a configuration with an endpoint; return its path."""
    path = where / "llm.toml"
    llm = '[llm]\nendpoint = true\nbase_url = "http://127.0.0.1:1/v1"\n'
    path.write_text(f"{llm}[policy.run]\n{policy}\n")
    return str(path)


def shell(script: str, *options: str) -> Outcome:
    """Run a shell script with options of ``run``."""
    return sandhost("run", *options, "--", "sh", "-ec", script)


@pytest.mark.slow
def test_a_recipes_variables_are_filled_in_at_the_start(tmp_path: Path) -> None:
    script = 'echo "$OPENAI_API_BASE $OPENAI_BASE_URL"'
    named = shell(script, "--config", configured(tmp_path), "--recipe", "aider")
    first, second = named.out.decode().split()
    assert first == second


@pytest.mark.slow
def test_each_child_of_a_pipeline_has_the_recipe(tmp_path: Path) -> None:
    config = configured(tmp_path)
    script = '{ cat; grep -c "$OPENAI_BASE_URL" ~/.codex/config.toml; } <&0'
    part = ("sh", "-ec", script)
    words = ("--config", config, "--recipe", "codex")
    outcome = sandhost("pipeline", *words, "--", *part, ":::", *part)
    assert outcome.out.split() == [b"1", b"1"], outcome.err


# The operator decides on a child of a daemon, not for a caller of its socket.
@pytest.mark.slow
def test_spawn_tells_where_a_recipe_belongs() -> None:
    outcome = sandhost("spawn", "--recipe", "codex", "--", "codex")
    assert outcome.status == 2
    assert outcome.said("set recipe = 'codex' in [policy.NAME]")


# The same by a policy, for children of a daemon, too.
@pytest.mark.slow
def test_a_policy_names_a_recipe(tmp_path: Path) -> None:
    config = configured(tmp_path, 'recipe = "codex"')
    script = 'cat ~/.codex/config.toml; echo "base_url = \\"$OPENAI_BASE_URL\\""'
    found = shell(script, "--config", config).out.decode().splitlines()
    assert found[-1] in found[:-1]
    agents = "[child.agent]\ncommand = ['cat', '.codex/config.toml']\npolicy = 'run'\n"
    assert sandhost("check-config", config).status == 0
    (tmp_path / "serve.toml").write_text(Path(config).read_text() + agents)
    assert sandhost("check-config", str(tmp_path / "serve.toml")).status == 0


def test_a_recipe_that_a_policy_cannot_have_is_told(tmp_path: Path) -> None:
    unknown = sandhost("check-config", configured(tmp_path, 'recipe = "codec"'))
    assert unknown.status != 0
    assert unknown.said("policy.run.recipe: no recipe of 'codec'; known: aider")
    needs = sandhost("check-config", configured(tmp_path, 'recipe = "smolagents"'))
    assert needs.status == 0
    assert needs.said("smolagents needs [llm] quota_status = 400")


@pytest.mark.slow
def test_the_script_of_a_recipe_writes_what_run_writes(tmp_path: Path) -> None:
    config = configured(tmp_path)
    script = sandhost("recipe", "opencode", "--shell").out.decode()
    see = (
        'cat ~/.config/opencode/* | sed "s#$OPENAI_BASE_URL#X#"; env | grep ^OPENCODE_'
    )
    by_run = shell(see, "--config", config, "--recipe", "opencode")
    by_script = shell(f"{script}\n{see}", "--config", config)
    assert by_run.out == by_script.out
    assert b'"baseURL": "X"' in by_run.out


def test_a_script_fills_in_the_places_of_a_recipe_and_nothing_else(
    tmp_path: Path,
) -> None:
    text = "${HOME} $HOME ${X} `id` \\ ${OPENAI_API_KEY}"
    one = Recipe("a", command=["a"], env={"A": f'"{text}"'}, files={"~/d/f": text})
    script = "\n".join([*script_of(one), 'echo "$A"; cat ~/d/f'])
    env = {"HOME": str(tmp_path), "OPENAI_API_KEY": "K", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["sh", "-ec", script], env=env, capture_output=True, text=True, check=True
    )
    said = f"{tmp_path} $HOME ${{X}} `id` \\ K"
    assert done.stdout.splitlines() == [f'"{said}"', said]


@pytest.mark.slow
def test_what_the_operator_sets_wins_over_a_recipe(tmp_path: Path) -> None:
    policy = 'home_files = { ".config/opencode/opencode.json" = "${HOME}" }'
    options = ["--config", configured(tmp_path, policy=policy), "--recipe", "opencode"]
    options += ["--env", "OPENCODE_DISABLE_AUTOUPDATE=mine"]
    script = "cat ~/.config/opencode/opencode.json; env | grep ^OPENCODE_ | sort"
    said = shell(script, *options).out.decode().split()
    assert said == [
        # Of a policy's text nothing is filled in.
        "${HOME}OPENCODE_DISABLE_AUTOUPDATE=mine", "OPENCODE_DISABLE_MODELS_FETCH=1",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_recipe_writes_its_files_into_an_empty_home_alone(tmp_path: Path) -> None:
    options = ["--config", configured(tmp_path), "--recipe", "codex"]
    options += ["--home", str(tmp_path / "kept")]
    script = 'cat ~/.codex/config.toml; echo "base_url = \\"$OPENAI_BASE_URL\\""'
    first = shell(f"{script}; echo theirs > ~/.codex/config.toml", *options)
    found = first.out.decode().splitlines()
    assert found[-1] in found[:-1]
    assert 'env_key = "OPENAI_API_KEY"' in found
    assert "${" not in "".join(found)
    assert not first.err
    again = shell("cat ~/.codex/config.toml", *options)
    assert again.out == b"theirs\n"
    assert "The recipe's files are not written" in again.err.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no OPENAI_BASE_URL is offered"),
        (("--sandbox", "none"), "in a HOME of its own"),
        (("--env", "HOME=/x"), "--home DIR"),
    ],
)
def test_a_recipe_that_cannot_be_filled_in_is_refused(
    options: tuple[str, ...], said: str
) -> None:
    outcome = shell("true", "--recipe", "codex", *options)
    assert outcome.status == 125
    assert said in outcome.err.decode()
    own = ("--env", "OPENAI_BASE_URL=http://127.0.0.1:1/v1")
    if not options:
        assert shell("true", "--recipe", "codex", *own).status == 0


def test_a_recipe_sets_what_its_agent_needs_of_the_host(tmp_path: Path) -> None:
    # spec MD6: smolagents sleeps a minute and more after its first 429.
    path = configured(tmp_path)
    config = load_config(path, once=True, for_daemon=False)
    assert config.llm is not None
    apply_recipe("llm", config)
    assert config.llm.quota_status is None
    apply_recipe("codex", config)
    assert config.llm.hosted_tools == "drop"
    assert config.llm.quota_status is None
    apply_recipe("smolagents", config)
    assert config.llm.quota_status == 400


def test_what_the_operator_has_written_out_stays(tmp_path: Path) -> None:
    path = Path(configured(tmp_path))
    written = 'quota_status = 429\nhosted_tools = "refuse"\n[policy.run]'
    path.write_text(path.read_text().replace("[policy.run]", written))
    config = load_config(str(path), once=True, for_daemon=False)
    for agent in ("codex", "smolagents"):
        apply_recipe(agent, config)
    assert config.llm is not None
    assert (config.llm.quota_status, config.llm.hosted_tools) == (429, "refuse")


def test_a_shell_completes_the_names_of_agents() -> None:
    for command, name in ((recipe, "agent"), (run, "recipe")):
        (asked,) = (one for one in command.params if one.name == name)
        context = click.Context(command)
        found = asked.shell_complete(context, "co")
        assert [item.value for item in found] == ["codex"]
