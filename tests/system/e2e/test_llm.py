"""The model as a child finds it.

`run --config` with `[llm]`, real children, real HTTP.
"""

import base64
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.helpers.canary import KEY
from tests.helpers.command import ENVIRONMENT, Outcome, heard, running, sandhost, shell
from tests.helpers.provider import key_file, provider_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[str]:
    """The stand-in as a process of its own; return its base URL."""
    with provider_process(tmp_path / "served") as base_url:
        yield base_url


def configured(where: Path, base_url: str, more: str = "") -> str:
    """Write a configuration; return its path."""
    path = where / "config.toml"
    path.write_text(
        f'[llm]\nbase_url = "{base_url}"\napi_key_file = "{key_file(where)}"\n{more}'
    )
    return str(path)


def run(where: Path, config: str, script: str, *options: str) -> Outcome:
    """Run a shell child."""
    (where / "root").mkdir(exist_ok=True)
    # Without walls: these scripts look at the root and at the network by themselves.
    words = ["run", "--config", config, "--sandbox", "none", *options]
    words += ["--root", str(where / "root"), "--journal", str(where / "journal")]
    return sandhost(*words, "--", "sh", "-c", script, cwd=where)


def events(where: Path) -> list[dict[str, object]]:
    """Read the journal."""
    return [json.loads(line) for line in (where / "journal").read_bytes().splitlines()]


def wait_for_request(log: Path) -> None:
    """Return when the provider has told its log of a request."""
    deadline_s = time.monotonic() + 60.0
    while not (log.exists() and log.read_bytes()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# spec L3, L4, L9, L13: the commands, `-` being the child's own streams.
def test_a_shell_child_asks_the_model(tmp_path: Path, provider: str) -> None:
    config = configured(tmp_path, provider, "[llm.quota]\nmax_tokens = 500\n")
    script = """
        echo "one two three" > root/notes
        sandhost llm chat -p "count this" -i notes -o answer
        cat root/answer; echo
        echo "four words are here" | sandhost llm chat -i - -r data_proc
        echo "five" | sandhost llm chat -p "a b" -i - -o copy -o - --restricted
        sandhost llm quota
        sandhost llm config
        sandhost llm chat -p hello --json | tail -c 40
    """
    outcome = run(tmp_path, config, script)
    assert outcome.err == b""
    lines = outcome.out.decode().splitlines()
    assert lines[0] == "The message has 7 words."
    assert lines[1:3] == ["The message has 4 words.", "The message has 3 words."]
    assert lines[3].endswith("remaining)")
    told = json.loads(lines[4])
    assert told["quota_max_tokens"] == 500
    assert told["base_url"] == provider
    assert lines[5].endswith("}")
    assert (tmp_path / "root" / "copy").read_text() == "The message has 3 words."
    called = [row for row in events(tmp_path) if row["event"] == "llm.called"]
    assert [row["outcome"] for row in called] == ["ok"] * 4
    assert not {"prompt", "text", "content"} & {key for row in called for key in row}


# spec L2, L3, L5, L11
def test_what_cannot_be_is_said_in_one_line(tmp_path: Path, provider: str) -> None:
    config = configured(tmp_path, provider)
    cases = (
        ("", 2, "no command; see: sandhost llm --help"),
        ("ask", 2, "unknown command 'ask'; see: sandhost llm --help"),
        ("chat -x", 2, "unknown argument '-x' for chat; see: sandhost llm --help"),
        ("chat -p", 2, "-p needs a value; see: sandhost llm --help"),
        ("chat -p a -p b", 2, "--prompt is given twice; see: sandhost llm --help"),
        ("quota now", 2, "quota takes no arguments; see: sandhost llm --help"),
        ("chat -p a -r nope", 1, "invalid preset: nope"),
        ("chat -p a -i /etc/passwd", 1, "failed to read input files data"),
        ("chat -p a -o b -o /etc/x", 1, "VFS access denied: '/etc/x'"),
        (
            "chat -p a -o b -o no/x",
            1,
            "failed to open file 'no/x': No such file or directory",
        ),
        (
            "chat -p !status=400",
            1,
            "OpenAI API call failed: 400 as it was told",
        ),
    )
    script = "".join(f"sandhost llm {words}; echo $?\n" for words, _, _ in cases)
    outcome = run(tmp_path, config, script, "--log-level", "error")
    assert outcome.out.split() == [b"%d" % status for _, status, _ in cases]
    assert outcome.err.decode().splitlines() == [
        f"sandhost llm: {said}" for _, _, said in cases
    ]


def test_outside_a_child_it_says_so() -> None:
    outcome = shell("$S llm quota 3<&-")
    assert outcome.status == 2
    assert outcome.said("not the child of a host")
    assert b"usage: sandhost llm chat" in sandhost("llm", "--help").out


# spec L12
def test_a_host_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[limits]\nwrite = '16M'\n")
    script = "for c in 'chat -p a' quota config; do sandhost llm $c; done"
    outcome = run(tmp_path, str(tmp_path / "config.toml"), script)
    assert outcome.err.decode().splitlines() == [
        "sandhost llm: LLM not available",
        "sandhost llm: LLM quota not available",
        "sandhost llm: LLM config not available",
    ]


# spec A5, L6, L9: a relay narrows model and quota.
def test_a_relay_narrows_the_model(tmp_path: Path, provider: str) -> None:
    config = configured(
        tmp_path,
        provider,
        'default_model = "big"\nrestricted_model = "small"\n'
        "[policy.run]\ntop_level = true\nquota = 1000\n",
    )
    script = """
        ask='sandhost llm chat -p hello --json | grep -o "model.:.[a-z]*"'
        sh -c "$ask"
        sandhost relay --model big --quota 77 -- sh -c "$ask; sandhost llm quota"
        sandhost relay --model small -- sh -c "$ask; sandhost llm quota"
        sandhost relay --model other -- true
    """
    outcome = run(tmp_path, config, script, "--log-level", "error")
    lines = outcome.out.decode().splitlines()
    assert [line[8:] for line in lines if "model" in line] == ["big", "big", "small"]
    assert "/77 weighted" in lines[2]
    assert "/1000 weighted" in lines[4]
    assert outcome.said("not within this client's rights: model 'other'")


def test_the_quota_of_a_running_host(tmp_path: Path, provider: str) -> None:
    config = configured(tmp_path, provider, "max_calls = 9\n")
    control = tmp_path / "control"
    script = f"""
        sandhost llm chat -p hello > out
        sandhost quota --control {control} --json > rows
        sandhost quota --control {control}
    """
    outcome = run(tmp_path, config, script, "--control", str(control))
    rows = json.loads((tmp_path / "rows").read_text())
    assert rows[0]["client_id"] is None
    assert rows[0]["max_calls"] == 9
    assert {row["calls"] for row in rows[:2]} == {1}
    assert b"(host)" in outcome.out


# spec L13, attack 24, I10: the canary shows nowhere.
def test_the_key_shows_nowhere(tmp_path: Path, provider: str) -> None:
    (tmp_path / "state").mkdir()
    path = tmp_path / "config.toml"
    path.write_text(
        f'[host]\nstate_dir = "{tmp_path}/state"\n'
        f'[llm]\nbase_url = "{provider}"\nendpoint = true\n'
        '[llm.quota]\nwindow = "never"\n[policy.run]\ntop_level = true\n'
    )
    script = """
        sandhost llm config; sandhost llm quota
        for order in '!leak' '!leak !plain' '!leak-refused' '!status=401' '!broken'
        do sandhost llm chat -p "$order" -o out --json; sandhost fs cat out; done
        env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a -v ^SPARE
        sandhost fs cat /proc/self/environ
        sandhost relay -- sh -c 'env; sandhost llm chat -p "!leak"'
    """
    env = {**ENVIRONMENT, "OPENAI_API_KEY": KEY}
    outcome = sandhost(
        "run", "--config", path, "--root", tmp_path, "--journal", tmp_path / "journal",
        "--sandbox", "none", "--log-level", "debug", "--pass-env", "OPENAI_API_KEY",
        "--", "sh", "-c", script, cwd=tmp_path, env=env,
    )  # fmt: skip
    assert b"[redacted]" in outcome.out
    found = [outcome.out, outcome.err]
    names = ("journal", "out", "state/llm-quota.sqlite3")
    found += [(tmp_path / name).read_bytes() for name in names]
    for form in (
        KEY.encode(),
        quote(KEY, safe="").encode(),
        base64.b64encode(KEY.encode()),
    ):
        for text in found:
            # Variables of this test: its own process, and its parents'.
            assert form not in text.replace(b"SPARE", b""), form
    assert b"OPENAI_API_KEY=sk-sandhost-" in outcome.out


# spec L13: a key that others may read is none.
def test_a_key_file_that_others_may_read_is_refused(
    tmp_path: Path, provider: str
) -> None:
    config = configured(tmp_path, provider)
    (tmp_path / "key").chmod(0o644)
    outcome = run(tmp_path, config, "true")
    assert outcome.status == 125
    assert outcome.said("other users may read or change it; chmod 600 it")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no key"), ("abc", "at least 4"), ("two keys", "more than one")],
)
def test_a_key_file_without_a_key_is_refused(
    tmp_path: Path, provider: str, text: str, said: str
) -> None:
    config = configured(tmp_path, provider)
    (tmp_path / "key").write_text(text)
    outcome = run(tmp_path, config, "true")
    assert outcome.status == 125
    assert outcome.said(said)


# spec L10: what was charged outlives the host, one that was killed too.
def test_a_host_that_is_killed_forgets_nothing(tmp_path: Path, provider: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[host]\nstate_dir = "{tmp_path}/state"\n'
        f'[llm]\nbase_url = "{provider}"\napi_key_file = "{key_file(tmp_path)}"\n'
        '[llm.quota]\nmax_tokens = 100\nwindow = "never"\n'
    )
    script = "sandhost llm chat -p '!prompt-tokens=90 !words=0'; echo done; sleep 60"
    words = ("run", "--config", path, "--", "sh", "-c", script)
    with running(*words) as process:
        heard(process, b"done")
        process.kill()
        process.wait()
    with sqlite3.connect(tmp_path / "state" / "llm-quota.sqlite3") as base:
        assert base.execute("SELECT tokens FROM spent").fetchall() == [(90.0,)]
    base.close()
    outcome = sandhost("run", "--config", path, "--", "sandhost", "llm", "quota")
    assert outcome.out == (b"90.0/100 weighted tokens (90.0% used, 10.0 remaining)\n")


# spec FL7, L10: a call is in the ledger before it is sent, with what it may cost at most.
def test_a_host_that_is_killed_in_a_call_counts_what_was_reserved(
    tmp_path: Path, provider: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[host]\nstate_dir = "{tmp_path}/state"\n'
        f'[llm]\nbase_url = "{provider}"\napi_key_file = "{key_file(tmp_path)}"\n'
        'max_tokens = 25\n[llm.quota]\nmax_tokens = 1000\nwindow = "never"\n'
    )
    call = ("sandhost", "llm", "chat", "-p", "!slow=600 hello")
    with running("run", "--config", path, "--", *call) as process:
        wait_for_request(tmp_path / "served")
        process.kill()
        process.wait()
    outcome = sandhost("run", "--config", path, "--", "sandhost", "llm", "quota")
    spent = float(outcome.out.split(b"/")[0])
    # At least the output, 25 tokens of weight 4, and the prompt beside it.
    assert 100.0 < spent < 200.0
    again = sandhost("run", "--config", path, "--", "sandhost", "llm", "quota")
    assert again.out == outcome.out
    with sqlite3.connect(tmp_path / "state" / "llm-quota.sqlite3") as base:
        assert base.execute("SELECT calls FROM spent").fetchall() == [(1,)]
        assert base.execute("SELECT * FROM reserved").fetchall() == []
    base.close()


# A service that a host does not offer costs nothing: openai takes over half a second to import.
@pytest.mark.parametrize("has_model", [False, True])
def test_a_host_without_a_model_never_loads_the_client_library(
    tmp_path: Path, provider: str, has_model: bool
) -> None:
    config = configured(tmp_path, provider)
    words = ["--config", config] if has_model else []
    command = [sys.executable, "-X", "importtime", "-m", "supervisor", "run", *words]
    outcome = subprocess.run(
        [*command, "--log-level", "error", "--", "true"],
        check=True,
        capture_output=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    loaded = {line.split(b"|")[-1].strip() for line in outcome.stderr.splitlines()}
    assert b"supervisor.run" in loaded
    heavy = {b"openai", b"httpx2", b"httpcore2", b"sqlite3"}
    assert heavy & loaded == (heavy if has_model else set())


CHILD = """
import json, os, sys
import openai
client = openai.OpenAI()
orders = sys.argv[1:]
answer = client.chat.completions.create(
    model="whatever", messages=[{"role": "user", "content": "one two"}], max_tokens=9)
print(answer.choices[0].message.content, answer.model, answer.usage.total_tokens > 0)
stream = client.chat.completions.create(
    model="big", messages=[{"role": "user", "content": "a b c"}], stream=True,
    stream_options={"include_usage": True})
pieces, usage = [], None
for event in stream:
    pieces += [c.delta.content or "" for c in event.choices]
    usage = event.usage or usage
print("".join(pieces), len(pieces) > 3, usage.prompt_tokens > 0)
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
answer = client.chat.completions.create(
    model="big", messages=[{"role": "user", "content": "!tool"}], tools=[tool])
print(answer.choices[0].message.tool_calls[0].function.name)
with client.chat.completions.stream(
    model="big", messages=[{"role": "user", "content": "!tool"}], tools=[tool]) as stream:
    done = [event for event in stream if event.type.endswith("arguments.done")]
print(done[0].name, done[0].arguments)
print(sorted(m.id for m in client.models.list().data))
for messages, more in (([], {}), ([{"role": "user", "content": "!status=400"}], {}),
                       ([{"role": "user", "content": "x"}], {"n": 3})):
    try:
        client.chat.completions.create(model="big", messages=messages, **more)
    except openai.APIStatusError as why:
        print(why.status_code, why.message)
try:
    openai.OpenAI(api_key="sk-no").models.list()
except openai.AuthenticationError as why:
    print(why.status_code)
for number in range(40):
    try:
        client.chat.completions.create(
            model="big", messages=[{"role": "user", "content": "!words=50"}])
    except openai.RateLimitError as why:
        print(why.status_code, why.code)
        break
import httpx2
path = os.environ["SANDHOST_LLM_SOCKET"]
by_socket = openai.OpenAI(
    http_client=httpx2.Client(transport=httpx2.HTTPTransport(uds=path)))
print(len(by_socket.models.list().data))
"""


# spec L6, L10, L13: the real package, unmodified, as the child.
def test_an_unmodified_program_finds_its_endpoint(
    tmp_path: Path, provider: str
) -> None:
    config = configured(
        tmp_path,
        provider,
        'default_model = "big"\nrestricted_model = "small"\nendpoint = true\n'
        "[llm.quota]\nmax_tokens = 3000\n[policy.run]\ntop_level = true\n",
    )
    (tmp_path / "child.py").write_text(CHILD)
    outcome = run(tmp_path, config, f"{sys.executable} child.py")
    assert outcome.err == b""
    assert outcome.out.decode().splitlines() == [
        "The message has 2 words. whatever True",
        "The message has 3 words. True True",
        "add",
        'add {"a": 1}',
        "['big', 'small']",
        "400 Error code: 400 - messages: a list of at least one",
        "400 Error code: 400 - OpenAI API call failed: 400 as it was told",
        "400 Error code: 400 - n: not available through this host",
        "401",
        "429 insufficient_quota",
        "2",
    ]


WALLED = """
import os, socket
line = socket.socket(socket.AF_UNIX)
line.connect(os.environ["SANDHOST_LLM_SOCKET"])
token = os.environ["OPENAI_API_KEY"]
line.sendall(f"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n"
             f"Authorization: Bearer {token}\\r\\n\\r\\n".encode())
print(line.recv(100).split(b"\\r")[0].decode())
"""


# spec L13: a child without a network reaches the endpoint by its socket.
def test_a_child_in_a_sandbox_reaches_its_socket(tmp_path: Path, provider: str) -> None:
    config = configured(tmp_path, provider, "endpoint = true\n")
    words = ("run", "--config", config, "--log-level", "error", "--")
    outcome = sandhost(*words, sys.executable, "-I", "-c", WALLED, cwd=tmp_path)
    assert outcome.err == b""
    assert outcome.out == b"HTTP/1.1 200 \n"


# The operator's word goes before what the host offers, and the log says so.
def test_a_variable_of_the_operators_goes_before_the_endpoints(
    tmp_path: Path, provider: str
) -> None:
    config = configured(tmp_path, provider, "endpoint = true\n[toolexec]\n")
    script = "echo $OPENAI_BASE_URL; echo $OPENAI_API_KEY; echo $AIFO_TOOLEEXEC_TOKEN"
    usual = run(tmp_path, config, script)
    assert usual.err == b""
    address, _, tools = usual.out.decode().split()
    assert address.startswith("http://127.0.0.1:")
    given = run(tmp_path, config, script, "--env", "OPENAI_BASE_URL=http://other/v1")
    # The host's token is not sent elsewhere.
    assert given.said(
        "OPENAI_BASE_URL is as --env or [child] env has it, and OPENAI_API_KEY is not set;"
        " leave it out there to have the host's own"
    )
    other, none, tools_too = given.out.decode().splitlines()
    assert (other, none) == ("http://other/v1", "")
    assert tools_too
    both = ("--env", "OPENAI_BASE_URL=http://other/v1", "--env", "OPENAI_API_KEY=own")
    assert run(tmp_path, config, script, *both).out.startswith(
        b"http://other/v1\nown\n"
    )
    given = run(tmp_path, config, script, "--env", "AIFO_TOOLEEXEC_URL=http://other")
    assert given.said("and AIFO_TOOLEEXEC_TOKEN is not set")
    assert given.out.decode().splitlines()[2] == ""
    given = run(tmp_path, config, script, "--env", "OPENAI_API_KEY=own")
    assert given.said("OPENAI_API_KEY is as --env or [child] env has it")
    own = given.out.decode().split()
    assert own[0].startswith("http://127.0.0.1:")
    assert own[1] == "own"
    assert own[2] not in ("", tools)
    # A variable that is only passed on was not set for this child.
    passed = run(tmp_path, config, script, "--pass-env", "OPENAI_BASE_URL")
    assert passed.err == b""
