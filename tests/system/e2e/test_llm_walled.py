"""The model's endpoint as unmodified programs find it, in the default profile."""

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from supervisor.control.client import call
from tests.helpers.command import SANDHOST, Outcome, sandhost
from tests.helpers.daemon import daemon
from tests.helpers.provider import key_file, provider_process
from tests.helpers.toolruns import program
from tests.system.e2e.older import without

pytestmark = pytest.mark.slow

STATUS = (
    "curl -s -o /dev/null -w '%{http_code}\\n' \"$OPENAI_BASE_URL/models\""
    ' -H "Authorization: Bearer $OPENAI_API_KEY"'
)
LISTENING = "grep -c ' 0A ' /proc/net/tcp"

ENDPOINT = "endpoint = true\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that others may enter; an address of a unix socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def llm(place: Path) -> Iterator[str]:
    """`[llm]` with a stand-in for a provider in a process of its own."""
    with provider_process(place / "served") as base_url:
        yield f'[llm]\nbase_url = "{base_url}"\napi_key_file = "{key_file(place)}"\n'


def run(where: Path, config: str, *command: str, **changes: object) -> Outcome:
    """Run a child, in the default profile where the configuration says nothing."""
    (where / "run.toml").write_text(config)
    words = ("run", "--config", where / "run.toml", "--log-level", "warning")
    return sandhost(*words, "--", *command, **{"cwd": where, **changes})


# spec L13, MD1: curl is a process of the child's own, and has what the child has.
@pytest.mark.nobody
def test_curl_reaches_it(place: Path, llm: str) -> None:
    outcome = run(place, llm + ENDPOINT, "sh", "-c", f"{STATUS}; {LISTENING}")
    assert (outcome.err, outcome.out) == (b"", b"200\n1\n")


# ADR 22: a child that makes no unix sockets has both by ports of its own.
def test_curl_reaches_the_model_and_tools_at_once(place: Path, llm: str) -> None:
    more = (
        "[toolexec]\n[sidecar.x]\nkind = 'python'\nallow = ['true']\n"
        "[sandbox.x]\nlayers = ['mountns', 'landlock', 'seccomp', 'userns', 'netns']\n"
        "unix_sockets = false\n[policy.run]\nsandbox = 'x'\n"
    )
    tool = (
        "curl -s -o /dev/null -w '%{http_code}\\n' -d tool=true -H 'X-Aifo-Proto: 1'"
        ' -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" "$AIFO_TOOLEEXEC_URL"'
    )
    script = f"{STATUS}; {tool}; {LISTENING}"
    outcome = run(place, llm + ENDPOINT + more, "sh", "-c", script)
    assert (outcome.err, outcome.out) == (b"", b"200\n200\n2\n")


OPENAI = """
import openai
client = openai.OpenAI()
ask = [{"role": "user", "content": "one two"}]
answer = client.chat.completions.create(model="any", messages=ask, max_tokens=9)
print(answer.choices[0].message.content)
stream = client.chat.completions.create(
    model="any", messages=ask, max_tokens=9, stream=True)
print("".join(event.choices[0].delta.content or "" for event in stream))
print(len(client.models.list().data))
"""


# spec L10: the real package, as it is. A child sees its working directory, so that this
# holds wherever the package is installed.
def test_the_package_of_openai_reaches_it(place: Path, llm: str) -> None:
    package = importlib.util.find_spec("openai")
    assert package is not None
    assert package.origin is not None
    installed = Path(package.origin).parents[1]
    command = (sys.executable, "-c", OPENAI)
    outcome = run(place, llm + ENDPOINT, *command, cwd=installed)
    assert outcome.err == b""
    assert outcome.out.decode().splitlines() == [
        "The message has 2 words.",
        "The message has 2 words.",
        "1",
    ]


# attack 24: what root owns in --cwd is the child's to read, and not the file of the key.
@pytest.mark.parametrize("layers", ["", "'mountns', 'userns', 'seccomp'"])
def test_a_key_file_in_its_working_directory_is_shut(
    place: Path, llm: str, layers: str
) -> None:
    more = f"[sandbox.x]\nlayers = [{layers}]\n[policy.run]\nsandbox = 'x'\n"
    (place / "other").write_text("seen")
    (key,) = re.findall('api_key_file = "(.*)"', llm)
    script = 'cat other; cat "$0" || echo; cp "$0" $TMPDIR; ls $TMPDIR'
    outcome = run(place, llm + (more if layers else ""), "sh", "-c", script, key)
    assert outcome.out == b"seen\n"
    assert outcome.err.count(b"Permission denied") == 2


def test_without_an_endpoint_nobody_listens_in_there(place: Path, llm: str) -> None:
    outcome = run(place, llm, "sh", "-c", f"env | grep -c OPENAI; {LISTENING}")
    assert (outcome.err, outcome.out) == (b"", b"0\n0\n")


NESTED = f"""
env | grep -Ec 'OPENAI|SANDHOST_LLM'
WHERE=$OPENAI_BASE_URL {SANDHOST} relay -- sh -c '
env | grep -Ec "OPENAI|SANDHOST_LLM"
curl -s -o /dev/null -w "%{{http_code}}\\n" "$WHERE/models"'
"""


# spec L13: the account is its parent's, and so is what names it. A child with the
# address has no TCP all the same: it makes no net namespace in its parent's.
def test_a_nested_child_has_none_of_the_three(place: Path, llm: str) -> None:
    outcome = run(place, llm + ENDPOINT, "sh", "-c", NESTED)
    assert outcome.out.splitlines() == [b"3", b"0", b"000"], outcome.err


# Missing layers are found by children who have made a listener already: the
# one that lives is another process, in another net namespace.
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number is another one")
def test_a_machine_without_landlock_has_it_too(place: Path, llm: str) -> None:
    older = without(444, 38)  # landlock_create_ruleset(2), ENOSYS
    outcome = run(place, llm + ENDPOINT, "sh", "-c", STATUS, wrapper=older)
    assert (outcome.err, outcome.out) == (b"", b"200\n")


TOOLS = """
[policy.run]
root = '{where}/root'
[toolexec]
listen = ['unix']
[sidecar.s]
kind = 'go'
path = ['{where}/bin']
"""


# spec L13, MD1: a tool has all the layers of its child, and the same way to the model.
@pytest.mark.nobody
def test_a_tool_of_such_a_child_reaches_the_model_as_it_does(
    place: Path, llm: str
) -> None:
    program(place / "bin", "go", f"env | grep -c OPENAI; {LISTENING}; {STATUS}")
    root = place / "root"
    assert sandhost("shim", root / "shims").status == 0
    config = llm + ENDPOINT + TOOLS.format(where=place)
    outcome = run(place, config, "sh", "-c", f"./shims/go; {STATUS}", cwd=root)
    assert outcome.out.split() == [b"2", b"1", b"200", b"200"], outcome.err


CHILD = """
[child.{name}]
command = ['sh', '-c', '''{script}; exec sleep 1000''']
restart = 'always'
backoff = '1ms'
"""


def test_children_of_a_daemon_reach_it_in_each_of_their_lives(
    place: Path, llm: str
) -> None:
    script = f"{STATUS}; {LISTENING}"
    config = llm + ENDPOINT
    config += "".join(CHILD.format(name=name, script=script) for name in "abc")
    with daemon(place, config) as running:

        def said(lives: int) -> bool:
            return all(running.log(name) == b"200\n1\n" * lives for name in "abc")

        for lives in range(1, 5):
            running.wait(partial(said, lives), f"what they say in {lives} lives")
            found = call(running.client.path, "leaks")
            assert found["clean"], {k: v for k, v in found.items() if v}
            # The listener of all, and two of each child: by path, and in there.
            assert found["explained"]["model endpoint"] == 7
            for name in "abc":
                running.client.kill(name, "KILL")
        assert running.end() == 0
    assert "ERROR" not in running.said()


# 3.1: what cannot be reached is told, where a profile has no net namespace.
@pytest.mark.nobody
def test_where_no_loopback_is_to_be_had_it_is_said(place: Path, llm: str) -> None:
    profile = (
        '[sandbox.kernels]\nlayers = ["landlock", "seccomp"]\n'
        '[policy.run]\nsandbox = "kernels"\n'
    )
    outcome = run(place, llm + ENDPOINT + profile, "sh", "-c", STATUS)
    assert outcome.out == b"000\n"
    said = b"goes without its listener on its loopback: it has no net namespace"
    assert outcome.err.count(said) == 1
    assert run(place, llm + profile, "true").err == b""


# The source of a key may be a descriptor of the host: a file or memory, which can be
# read again, and no pipe.
def test_a_key_may_be_a_descriptor(place: Path, llm: str) -> None:
    key = os.memfd_create("key", 0)
    os.fchmod(key, 0o600)
    os.write(key, (place / "key").read_bytes())
    named = re.sub(r'api_key_file = ".*"', f'api_key_file = "/dev/fd/{key}"', llm)
    try:
        outcome = run(
            place,
            named + ENDPOINT,
            "sh",
            "-c",
            f"{STATUS}; ls /proc/self/fd",
            pass_fds=(key,),
        )
        assert outcome.out.split() == [b"200", b"0", b"1", b"2", b"3", b"4"]
        reader, writer = os.pipe()
        piped = re.sub(r"/dev/fd/\d+", f"/dev/fd/{reader}", named)
        outcome = run(place, piped, "true", pass_fds=(reader,))
        assert outcome.status == 125
        assert outcome.said("not a regular file")
        os.close(reader)
        os.close(writer)
    finally:
        os.close(key)
