"""LLM fds from outside: `run --config` with `[tools]` and `[file_descriptor]`."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.config import fds as config_fds
from supervisor.llmfd import checkpoints
from tests.helpers.command import SANDHOST, TIMEOUT_S, Outcome, heard, running, sandhost
from tests.helpers.daemon import daemon

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
        ("[file_descriptor]\nkeep_checkpoints = -1\n", "0 (all) to 1000"),
        ("[file_descriptor]\nkeep_checkpoints = 1001\n", "0 (all) to 1000"),
        (
            "[file_descriptor]\nkeep_checkpoints_for = 'soon'\n",
            "keep_checkpoints_for: not a time",
        ),
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
        ("[tools]\nenabled = ['read_fd', 'fork']\n", "'fork' needs a model"),
    ],
)
def test_what_looks_like_a_mistake_is_a_warning(
    tmp_path: Path, text: str, said: str
) -> None:
    outcome = run_with(tmp_path, text, "echo ran")
    assert (outcome.status, outcome.out) == (0, b"ran\n")
    assert outcome.said(said)
    checked = sandhost("check-config", "config.toml", cwd=tmp_path)
    assert (checked.status, checked.out) == (0, b"config.toml: no faults\n")
    assert checked.said(said)


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


CONFIG = """
    [tools]
    enabled = ["read_fd", "fd_to_file", "search_fd", "rename_fd", "mark_fd_section",
        "get_fd_section", "create_temp_file", "read_temp_file", "write_temp_file",
        "checkpoint_process", "restore_process", "list_checkpoints",
        "delete_checkpoint"]
    """


def test_the_command_speaks_for_shell_scripts(tmp_path: Path) -> None:
    script = """
        seq 1 5000 | $0 fd wrap --source tool:seq | head -1
        $0 fd read fd:1 2 | head -1
        $0 fd read fd:1 --lines 4999-5000
        $0 fd read fd:1 --all | tail -2
        $0 fd search fd:1 '^49.9$' --regex --context=0 --max-results 1 | head -3
        $0 fd rename fd:1 numbers
        $0 fd read fd:9; echo status $?
        $0 fd write-to-file fd:1 out.txt --start-line 7 --end-line 8 --no-exist-ok | head -1
        $0 fs cat out.txt
        echo short | $0 fd wrap
        t=$(printf 'a' | $0 fd put); printf b | $0 fd put $t >/dev/null
        $0 fd call create_temp_file '{"content":{"token":"'$t'"}}'
        $0 fd temp-read temp:1
        printf new | $0 fd temp-write temp:1 --version 1
        $0 fd info fd:1 | cut -c1-29
        $0 fd checkpoint before | cut -c1-15
        $0 fd read_fd fd:1 --unit paragraph --index 1 | head -1
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.err == b""
    assert outcome.out.decode() == SAID


SAID = """\
<fd_result fd="fd:1" pages="6" truncated="false" lines="1-1021" total_lines="5000">
<fd_content fd="fd:1" page="2" pages="6" continued="false" truncated="false" \
lines="1022-1821" total_lines="5000">
<fd_content fd="fd:1" page="lines" pages="6" continued="false" truncated="false" \
lines="4999-5000" total_lines="5000">
4999
5000

</fd_content>

</fd_content>
<fd_search fd="fd:1" query="^49.9$" matches="10" returned="1" truncated="true" \
total_lines="5000" next_line="4919">
  <match line="4909" col="1" lines="4909-4909">
4909
<fd_rename fd="fd:1" name="numbers" previous=""/>
<fd_error type="not_found" fd="fd:9">
  <message>File descriptor fd:9 not found</message>
</fd_error>
status 1
<fd_write fd="fd:1" file_path="out.txt" success="true" mode="write">
7
8
short
<temp_file id="temp:1" version="1" bytes="2"/>
<temp_content id="temp:1" version="1">
ab
</temp_content>
<temp_file id="temp:1" version="2" bytes="3"/>
<fd_info fd="fd:1" source="to
<checkpoint id=
<fd_content fd="fd:1" page="paragraph" pages="6" continued="false" \
truncated="false" lines="1-5000" total_lines="5000" unit="paragraph" index="1" \
units="1">
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no command"),
        ("frobnicate", "unknown command 'frobnicate'"),
        ("read fd:1 x", "--page takes a number"),
        ("list more", "list takes no argument"),
        ("wrap --source", "--source needs a value"),
        ("wrap --text a", "wrap has no option --text"),
        ("temp-create --version 1", "temp-create has no option --version"),
        ("temp-write --version 1", "temp-write takes TEMP_FILE_ID"),
        ("read fd:1 --lines 3-x", "--lines takes FIRST-LAST"),
        ("read fd:1 --lines -3", "--lines takes FIRST-LAST"),
        ("search fd:1 a --regex=yes", "--regex takes true or false"),
        ("call read_fd [", "not JSON"),
        ("call", "call takes a name"),
    ],
)
def test_a_wrong_command_line_is_told(tmp_path: Path, words: str, said: str) -> None:
    outcome = run_with(tmp_path, CONFIG, f"$0 fd {words}")
    assert (outcome.status, outcome.out) == (2, b"")
    assert outcome.said(said)


def test_what_is_handed_back_is_what_came_and_a_token_must_be_known(
    tmp_path: Path,
) -> None:
    script = """
        printf short | $0 fd wrap; echo .
        $0 fd wrap </dev/null; echo .
        for input in /dev/null /etc/hostname; do $0 fd put t9 <$input; echo $?; done
        $0 fd call summarize_fd; $0 fd call fork
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.out == b"short.\n.\n1\n1\n"
    said = outcome.err.decode().splitlines()
    assert said == [
        *["sandhost fd: invalid token: t9"] * 2,
        *(
            f"sandhost fd: invalid fd call: {name} needs a model, and this host has none"
            for name in ("summarize_fd", "fork")
        ),
    ]


INTERRUPTED = """
import fcntl, signal, subprocess, sys, termios
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, close_fds=False)
process.stdin.write(b"x" * 3_000_000)
process.stdin.flush()
while any(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))):
    pass
process.send_signal(signal.{number})
print(process.wait())
"""
"""Starts a command, writes to it, and ends it when it has taken everything."""

MOST_TOKENS = 64
"""Contents that a client may have begun and not used."""

PUT_MANY = r"""
put() { for i in $(seq $1); do printf 'FD_PUT 2\nx\n' >&3; read -r r <&3; echo "$r"; done; }
"""
"""Puts contents in as `fd put` does, without as many starts of a command."""


@pytest.mark.parametrize(
    "words",
    [
        "wrap --frob 1",
        f"wrap --source {'s' * 501}",
        "temp-write temp:9",
        "temp-create",  # not listed in [tools] enabled
    ],
)
def test_a_command_that_fails_leaves_no_content_behind(
    tmp_path: Path, words: str
) -> None:
    text = '[tools]\nenabled = ["read_fd", "write_temp_file"]\n'
    script = f"""{PUT_MANY}
        put {MOST_TOKENS - 1} | grep -c '^OK t'
        for i in 1 2; do echo x | $0 fd {words} >/dev/null; done 2>/dev/null
        echo short | $0 fd wrap
        """
    outcome = run_with(tmp_path, text, script)
    assert (outcome.out, outcome.err) == (b"63\nshort\n", b"")


@pytest.mark.parametrize(
    ("number", "status"), [("SIGINT", 130), ("SIGTERM", -15), ("SIGHUP", -1)]
)
def test_a_command_that_a_signal_ends_leaves_no_content_behind(
    tmp_path: Path, number: str, status: int
) -> None:
    # More than a pipe holds: when the last of it is taken, the first has its token.
    program = INTERRUPTED.replace("{number}", number)
    script = f"""{PUT_MANY}
        put {MOST_TOKENS - 1} | grep -c '^OK t'
        for i in 1 2; do
            python3 -c '{program}' $0 fd wrap
        done
        echo short | $0 fd wrap
        """
    outcome = run_with(tmp_path, CONFIG, script)
    said = f"63\n{status}\n{status}\nshort\n"
    assert (outcome.out.decode(), outcome.err) == (said, b"")


def test_one_content_too_many_is_told_with_what_to_do(tmp_path: Path) -> None:
    script = f"""{PUT_MANY}
        put {MOST_TOKENS} | grep -c '^OK t'
        echo short | $0 fd wrap || $0 fd call wrap_output '{{"token":"t1"}}'
        echo short | $0 fd wrap
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.out == b"64\nx\nshort\n"
    assert outcome.said(
        "64 contents were put in and no call has used them, the most there may be; use"
        " one (wrap_output takes its token), or start the child anew"
    )


@pytest.mark.parametrize("word", ["wrap", "wrap-input"])
def test_what_looks_like_an_answer_is_handed_back_as_it_came(
    tmp_path: Path, word: str
) -> None:
    script = f"""
        printf '<fd_error type="x">' | $0 fd {word}; echo $?
        printf '<fd_result fd="x">' | $0 fd {word}; echo $?
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.out == b'<fd_error type="x">0\n<fd_result fd="x">0\n'


def test_lines_may_go_to_the_end(tmp_path: Path) -> None:
    script = """
        seq 1 5000 | $0 fd wrap >/dev/null
        $0 fd read fd:1 --lines 4998- | grep -c '^4'
        $0 fd read fd:1 --lines 4998 | grep -c '^4'
        """
    assert run_with(tmp_path, CONFIG, script).out == b"2\n1\n"


def test_outside_a_child_the_command_says_so(tmp_path: Path) -> None:
    outcome = sandhost("fd", "list", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said("sandhost fd: ")
    assert b"usage: sandhost fd" in sandhost("fd", "--help").out


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ("", ["fd:1", "fd:2"]),
        ("--fd fd:2", ["fd:2"]),
        ("--fd fd-1 --fd fd:2", ["fd:1", "fd:2"]),
        ("--fd fd:1:3998- --fd fd:2", ["fd:2", "fd:3"]),
        ("--no-fds", []),
    ],
)
def test_a_nested_child_has_what_it_is_given(
    tmp_path: Path, options: str, listed: list[str]
) -> None:
    script = f"""
        seq 1 4000 | $0 fd wrap >/dev/null; seq 1 5000 | $0 fd wrap >/dev/null
        $0 relay {options} -- sh -c '
            $0 fd list | grep -o "<fd fd=.fd:[0-9]"
            seq 1 6000 | $0 fd wrap >/dev/null' $0
        echo mine; $0 fd list | grep -o "<fd fd=.fd:[0-9]"
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.status == 0, outcome.err
    before, _, after = outcome.out.decode().partition("mine\n")
    assert [line[-4:] for line in before.splitlines()] == listed
    assert [line[-4:] for line in after.splitlines()] == ["fd:1", "fd:2"]


@pytest.mark.parametrize(
    ("lines", "there"),
    [
        ("2-3", [b"2", b"3"]),
        ("-2", [b"1", b"2"]),
        ("4000-", [b"4000"]),
        ("7", [b"7"]),
        ("3999-9999", [b"3999", b"4000"]),
    ],
)
def test_a_nested_child_has_the_lines_it_is_given(
    tmp_path: Path, lines: str, there: list[bytes]
) -> None:
    script = f"""
        seq 1 4000 | $0 fd wrap >/dev/null
        $0 relay --fd fd:1:{lines} -- sh -c '
            $0 fd read fd:1 || true; $0 fd read fd:2 --all; $0 fd info fd:2' $0
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.status == 0, outcome.err
    assert b"fd:1 not found" in outcome.out
    body = outcome.out.partition(b"<fd_content ")[2].partition(b"</fd_content>")[0]
    assert body.partition(b">")[2].split() == there
    assert b'source="fd:1 lines ' in outcome.out


@pytest.mark.parametrize(
    ("fd", "why"),
    [
        ("fd:9", "File descriptor fd:9 not found"),
        ("fd:1:x", "File descriptor fd:1:x not found"),
        ("fd:1:3-2", "Invalid line range 3-2. Valid range: 1-4000"),
        ("fd:1:0-2", "Invalid line range 0-2. Valid range: 1-4000"),
    ],
)
def test_a_nested_child_is_not_started_with_what_is_not_there(
    tmp_path: Path, fd: str, why: str
) -> None:
    script = f"seq 1 4000 | $0 fd wrap >/dev/null; $0 relay --fd {fd} -- echo ran"
    outcome = run_with(tmp_path, CONFIG, script)
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(f"cannot choose the LLM fds: {why}")


def test_a_nested_child_does_not_get_by_a_checkpoint_what_it_was_not_given(
    tmp_path: Path,
) -> None:
    script = """
        seq 1 4000 | $0 fd wrap >/dev/null
        id=$($0 fd checkpoint | cut -d'"' -f2)
        $0 relay --no-fds -- sh -c '
            $0 fd checkpoints; $0 fd restore $1; $0 fd list' $0 $id
        $0 fd restore $id
        """
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.status == 0, outcome.err
    assert b'<checkpoints count="0"/>' in outcome.out
    assert b"not found</message>" in outcome.out
    assert b'<fd_list count="0"/>' in outcome.out
    assert outcome.out.endswith(b'fds="1" messages="0"/>\n')


def test_a_checkpoint_outlives_the_host(tmp_path: Path) -> None:
    text = CONFIG + f'[host]\nstate_dir = "{tmp_path}/state"\n'
    first = "seq 1 4000 | $0 fd wrap >/dev/null; $0 fd checkpoint one | cut -d'\"' -f2"
    checkpoint_id = run_with(tmp_path, text, first).out.decode().strip()
    assert checkpoint_id.startswith("ckpt:")
    script = f"$0 fd restore {checkpoint_id}; $0 fd read fd:1 --lines 4000-4000"
    outcome = run_with(tmp_path, text, script)
    assert outcome.out.splitlines()[2] == b"4000"
    pipeline = ("pipeline", "--config", "config.toml", "--", "true", ":::")
    other = sandhost(*pipeline, SANDHOST, "fd", "checkpoints", cwd=tmp_path)
    assert other.out == b'<checkpoints count="0"/>\n'


def test_the_state_of_a_host_is_for_its_user_and_for_no_second_host(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    text = CONFIG + f'[host]\nstate_dir = "{state}"\n'
    (tmp_path / "config.toml").write_text(text)
    words = ("run", "--config", "config.toml", "--")
    script = ("sh", "-c", "echo up; read go")
    with running(*words, *script, cwd=tmp_path, stdin=subprocess.PIPE) as first:
        heard(first, b"up\n")
        outcome = sandhost(*words, "echo", "ran", cwd=tmp_path)
        first.communicate(b"go\n", TIMEOUT_S)
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(
        f"sandhost run: cannot use '{state}/checkpoints': another host keeps its"
        " checkpoints there; stop that one, or give this one another [host] state_dir"
    )
    for path in (state, state / "checkpoints"):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_surrogate_for_an_id_does_not_end_the_connection(tmp_path: Path) -> None:
    words = '{"name":"%s","arguments":{"checkpoint_id":"\\ud800"}}'
    calls = (words % name for name in ("restore_process", "delete_checkpoint"))
    script = CALL + "\n".join(f"call '{call}'" for call in calls)
    outcome = run_with(tmp_path, CONFIG, script)
    assert outcome.err == b""
    assert outcome.out.count(b'<fd_error type="not_found" fd="">') == 2


def test_checkpoints_go_when_they_are_told_to(tmp_path: Path) -> None:
    text = CONFIG + "[file_descriptor]\nkeep_checkpoints = 2\n"
    script = """
        for n in 1 2 3; do $0 fd checkpoint $n >/dev/null; done
        $0 fd checkpoints | grep -o 'label="."'
        id=$($0 fd checkpoints | grep 'label="2"' | cut -d'"' -f2)
        $0 fd forget $id | sed "s/$id/ID/"
        $0 fd checkpoints | grep -o 'label="."'
        $0 fd forget $id >/dev/null; echo status $?
        """
    outcome = run_with(tmp_path, text, script)
    assert outcome.err == b""
    assert outcome.out.decode().splitlines() == [
        *('label="2"', 'label="3"', '<checkpoint_deleted id="ID"/>', 'label="3"'),
        "status 1",
    ]


def test_the_configuration_knows_how_many_checkpoints_there_may_be() -> None:
    assert config_fds.MOST_CHECKPOINTS == checkpoints.MOST_CHECKPOINTS


PUT = """
import sys, time
from vfs.client import Client

client = Client()
for number in range(3):
    token = client.fd_put(b"%d\\n" % number * 100_000)
    client.fd_call("wrap_output", token=token)
client.fd_put(b"begun " * 100_000)
print("put", flush=True)
time.sleep(1000)
"""


# attack 39: contents that a dead host had on the disk are a child's secrets, and room.
def test_contents_of_a_killed_daemon_are_removed_by_the_next(tmp_path: Path) -> None:
    command = json.dumps([sys.executable, "-I", "-c", PUT])
    config = f"""
[tools]
enabled = ["read_fd"]
[file_descriptor]
enabled = true
max_memory = "64K"
[policy.p]
sandbox = "none"
[child.a]
command = {command}
policy = "p"
"""
    contents = tmp_path / "state/checkpoints/contents"
    with daemon(tmp_path, config) as first:
        first.wait(lambda: b"put" in first.log("a"), "its word")
        assert len(list(contents.iterdir())) == 4
        first.send(signal.SIGKILL)
        first.process.wait(TIMEOUT_S)
    left = {file.name for file in contents.iterdir()}
    assert len(left) == 4
    with daemon(tmp_path, config) as second:
        assert "Removed 4 contents that a dead host has left" in second.said()
        second.wait(lambda: len(list(contents.iterdir())) == 4, "its contents")
        # Contents are named by their hash; a partial one has a random name.
        assert len(left & {file.name for file in contents.iterdir()}) == 3
        assert second.end() == 0
    assert list(contents.iterdir()) == []
