"""LLM fds with the model of the host: fork and summaries through the real gateway."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, sandhost
from tests.helpers.provider import key_file, provider_process

pytestmark = pytest.mark.slow


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[str]:
    """The stand-in for a provider as a process of its own; return its base URL."""
    with provider_process(tmp_path / "provider.log") as base_url:
        yield base_url


def prompt_tokens(where: Path) -> list[int]:
    """Return how long the prompt of each request was, as the provider counts it."""
    found: dict[int, int] = {}
    for line in (where / "provider.log").read_text().splitlines():
        row = json.loads(line)
        found[row["request"]] = row["prompt_tokens"]
    return list(found.values())


def test_a_child_forks_and_summarizes_under_its_quota(
    tmp_path: Path, provider: str
) -> None:
    (tmp_path / "config.toml").write_text(
        f'[llm]\nbase_url = "{provider}"\napi_key_file = "{key_file(tmp_path)}"\n'
        "max_tokens = 100\n[llm.quota]\nmax_tokens = 100000\n"
        '[tools]\nenabled = ["read_fd", "fork", "spawn", "summarize_fd"]\n'
    )
    prompts = json.dumps({"prompts": ["one", "two"]})
    script = f"""
        seq 1 5000 | $0 fd wrap >/dev/null
        $0 fd summarize fd:1 | head -1
        $0 fd call fork '{prompts}' | grep '<child'
        $0 fd call spawn '{{"program":"nobody","query":"x"}}' | head -1
        printf 'LLM_QUOTA\\n' >&3; read -r reply <&3; echo "$reply" | cut -c1-5
        """
    words = ("run", "--config", "config.toml", "--", "bash", "-c", script, SANDHOST)
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.err == b""
    assert outcome.out.decode().splitlines()[:-1] == [
        '<fd_summary fd="fd:1" available="true">',
        '  <child index="1" success="true">',
        '  <child index="2" success="true">',
        '<fd_error type="not_found" fd="">',
    ]
    assert outcome.out.splitlines()[-1] != b"OK 0."


# spec L5: a preset with tools, and a conversation that goes on, from a shell child.
def test_a_child_asks_an_agent_and_goes_on(tmp_path: Path, provider: str) -> None:
    (tmp_path / "config.toml").write_text(
        f'[llm]\nbase_url = "{provider}"\napi_key_file = "{key_file(tmp_path)}"\n'
        'max_tokens = 100\n[llm.presets.agent]\nsystem = "x"\ntools = true\n'
        '[tools]\nenabled = ["read_fd", "fd_to_file"]\n'
    )
    call = ["fd_to_file", {"fd": "fd:1", "file_path": "copy"}]
    prompt = "!script=" + json.dumps([[call], "written"], separators=(",", ":"))
    script = f"""
        seq 1 5000 | $0 fs put log
        $0 llm chat -r agent@mine -p '{prompt}' -i log -o answer
        $0 fs cat answer; echo
        $0 fs cat copy | tail -1
        $0 llm chat -r agent@mine -p 'and now'
        $0 llm chat -r agent@ -p 'and now'
        """
    words = ("run", "--config", "config.toml", "--", "bash", "-c", script, SANDHOST)
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.out.decode().splitlines() == [
        *("written", "5000", "The message has 2 words.")
    ]
    assert outcome.err == b"sandhost llm: invalid preset: agent@\n"
    # Earlier messages are sent again: the tool's call and its result as well.
    first, second, third = prompt_tokens(tmp_path)
    assert first < second < third


def test_a_conversation_goes_on_in_another_process(
    tmp_path: Path, provider: str
) -> None:
    # spec L5: it is the client's, whoever of the child's processes speaks
    (tmp_path / "config.toml").write_text(
        f'[llm]\nbase_url = "{provider}"\napi_key_file = "{key_file(tmp_path)}"\n'
    )
    script = """
        $0 llm chat -r general@a -p 'one and the same'
        $0 llm chat -r general@a -p 'one and the same'
        $0 llm chat -r general@b -p 'one and the same'
        $0 llm chat -r general -p 'one and the same'
        """
    words = ("run", "--config", "config.toml", "--", "bash", "-c", script, SANDHOST)
    assert sandhost(*words, cwd=tmp_path).status == 0
    begun, gone_on, other, alone = prompt_tokens(tmp_path)
    assert begun == other == alone < gone_on
