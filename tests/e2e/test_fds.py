"""LLM fds from outside: `run --config` with `[tools]` and `[file_descriptor]`."""

from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, Outcome, sandhost

pytestmark = pytest.mark.slow

CALL = r"""
call() { printf 'FD_CALL %d\n%s' ${#1} "$1" >&3; read -r r <&3; echo "$r" | cut -c1-60
case "$r" in OK*) head -c "${r#OK }" <&3; echo;; esac; }
"""


def run_with(where: Path, text: str, script: str) -> Outcome:
    """Run a shell script under a configuration."""
    (where / "config.toml").write_text(text)
    words = ("run", "--config", "config.toml", "--", "bash", "-c", script, SANDHOST)
    return sandhost(*words, cwd=where)


def test_a_configuration_turns_them_on(tmp_path: Path) -> None:
    text = '[tools]\nenabled = ["read_fd"]\n'
    script = CALL + """call '{"name":"list_fds"}'; call '{"name":"search_fd"}'"""
    outcome = run_with(tmp_path, text, script)
    assert outcome.err == b""
    assert outcome.out == (
        b'OK 20\n<fd_list count="0"/>\nERROR invalid fd call: not enabled: search_fd\n'
    )


def test_without_the_sections_there_are_none(tmp_path: Path) -> None:
    outcome = run_with(tmp_path, "", CALL + """call '{"name":"list_fds"}'""")
    assert outcome.out == b"ERROR LLM fds not available\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[file_descriptor]\nenabled = true\n", "file_descriptor.enabled: true, but"),
        ("[file_descriptor]\ndefault_page_size = 0\n", "default_page_size: at least 1"),
        ("[file_descriptor]\nmax_memory = 'big'\n", "max_memory: not a size"),
        ("[file_descriptor]\nescape = 'no'\n", "escape: xml or raw"),
        ("[file_descriptor]\npage_user_input = 1\n", "page_user_input"),
        ("[file_descriptor]\ntypo = 1\n", "typo"),
        ("[tools]\nenabled = 'read_fd'\n", "tools"),
        ("[tools]\ntypo = []\n", "typo"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    outcome = run_with(tmp_path, text, "echo ran")
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[file_descriptor]\nmax_input_chars = 9\n", "it is off"),
        (
            (
                "[file_descriptor]\nmax_direct_output_chars = 9\n"
                "[tools]\nenabled = ['read_fd']\n"
            ),
            "less than default_page_size",
        ),
        ("[tools]\nenabled = ['web_search']\n", "'web_search' is no tool"),
    ],
)
def test_what_looks_like_a_mistake_is_a_warning(
    tmp_path: Path, text: str, said: str
) -> None:
    outcome = run_with(tmp_path, text, "echo ran")
    assert (outcome.status, outcome.out) == (0, b"ran\n")
    assert outcome.said(said)


def test_pages_have_the_size_that_is_configured(tmp_path: Path) -> None:
    text = """
        [tools]
        enabled = ["read_fd"]
        [file_descriptor]
        max_direct_output_chars = 10
        default_page_size = 5
        escape = "raw"
        """
    script = (
        CALL
        + """call '{"name":"wrap_output","arguments":{"text":"<1>\\n<2>\\n<3>\\n"}}'"""
    )
    outcome = run_with(tmp_path, text, script)
    assert (
        b'<fd_result fd="fd:1" pages="3" truncated="false" lines="1-1"' in outcome.out
    )
    assert b"Output exceeds 10 characters." in outcome.out
    assert b"<preview>\n<1>\n\n</preview>" in outcome.out
