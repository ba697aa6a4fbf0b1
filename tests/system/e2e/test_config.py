"""`run --config F`: settings of `[policy.run]`, refusals with file and key."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, Outcome, sandhost

pytestmark = pytest.mark.slow


def run_with(where: Path, text: str, script: str, *options: str | Path) -> Outcome:
    """Run a shell script under a configuration, in a directory of its own."""
    (where / "config.toml").write_text(text)
    words = ("run", "--config", "config.toml", *options, "--log-level", "error")
    return sandhost(*words, "--", "sh", "-c", script, SANDHOST, cwd=where)


def test_policy_run_gives_the_defaults(tmp_path: Path) -> None:
    for name in ("root", "granted"):
        (tmp_path / name).mkdir()
    (tmp_path / "granted" / "file").write_text("granted\n")
    text = f"""
        [policy.run]
        root = "{tmp_path}/root"
        read = ["{tmp_path}/granted"]
        limits = {{ open_files = 1, bytes = "8" }}
        publish = "on-close"
        durability = "close"
        """
    script = (
        f"$0 fs cat {tmp_path}/granted/file; echo 1234567 | $0 fs put a;"
        "echo 12345678 | $0 fs put b; ls root; echo $FSPROXY_TOP_LEVEL"
    )
    outcome = run_with(tmp_path, text, script)
    assert outcome.status == 0
    # With publication at CLOSE, the file that did not fit never appears.
    assert outcome.out == b"granted\na\nfalse\n"
    assert b"Disk quota exceeded" in outcome.err


def test_options_go_before_the_configuration(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    text = '[policy.run]\nroot = "own"\nlimits = { open_files = 1 }\n'
    script = "for n in a b; do printf 'OPEN %s w false\\n' $n >&3; read -r r <&3; echo $r; done"
    options = ("--root", "other", "--limit", "open_files=2")
    outcome = run_with(tmp_path, text, script, *options)
    assert (outcome.status, outcome.out) == (0, b"OK 1000\nOK 1001\n")
    assert sorted(p.name for p in (tmp_path / "other").iterdir()) == ["a", "b"]
    assert not list((tmp_path / "own").iterdir())


def test_a_top_level_right_may_come_from_the_configuration(tmp_path: Path) -> None:
    text = "[policy.run]\ntop_level = true\n"
    outcome = run_with(tmp_path, text, "$0 fs cat config.toml")
    assert (outcome.status, outcome.out) == (0, text.encode())


# spec W3: the cap on WRITE is configurable, and told.
def test_the_cap_on_a_write_is_configurable(tmp_path: Path) -> None:
    script = (
        "printf 'OPEN a w false\\n' >&3; read -r r <&3;"
        "printf 'WRITE 1000 5\\nabcde' >&3; read -r r <&3; echo $r;"
        "printf 'WRITE 1000 4\\nabcd' >&3; read -r r <&3; echo $r"
    )
    outcome = run_with(tmp_path, "[limits]\nwrite = '4'\n", script)
    assert outcome.out == b"ERROR invalid size: 5 exceeds limit 4\nOK 4\n"


# spec F8: so is the deadline.
def test_the_deadline_is_configurable(tmp_path: Path) -> None:
    script = "printf 'PI' >&3; cat <&3; echo closed"
    outcome = run_with(tmp_path, "[limits]\ndeadline = '200ms'\n", script)
    assert (outcome.status, outcome.out) == (0, b"closed\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[llm]\ntypo = 1\n", "typo"),
        ("[llm]\ntimeout = '0s'\n", "llm.timeout: more than nothing"),
        ("[llm]\nmax_tokens = 0\n", "llm.max_tokens: at least 1"),
        ("[llm]\ntemperature = 9\n", "llm.temperature: between 0 and 2"),
        ("[llm]\nquota_status = 403\n", "llm.quota_status: 429 or 400"),
        (
            "[llm.models.m]\nmax_tokens_as = 'n'\n",
            "llm.models.m.max_tokens_as: max_tokens or max_completion_tokens",
        ),
        ("[llm]\nbase_url = 'ftp://x'\n", "llm.base_url: an address such as"),
        ("[llm]\ndefault_model = ''\n", "llm.default_model: a model's name"),
        ("[llm]\napi_key_file = 'no'\n", "llm.api_key_file: cannot use key file 'no'"),
        ("[llm.quota]\nmax_tokens = 0\n", "llm.quota.max_tokens: more than 0"),
        ("[llm.quota]\nwindow = 'week'\n", "llm.quota.window: run, day or never"),
        ("[llm.quota.weights]\ninput = -1\n", "llm.quota.weights.input: a number"),
        ("[llm.quota.models.m]\ninput = inf\n", "llm.quota.models.m.input"),
        ("[llm.models.m]\nweights = { output = nan }\n", "llm.models.m.weights"),
        ("[llm.models.m]\napi_key_file = 'k'\n", "a key needs its own base_url"),
        (
            "[llm.presets.p]\nsystem = ''\ntools = true\n",
            "llm.presets.p.tools: true, but there are no LLM fds; list read_fd",
        ),
        ("[llm.presets.'a b']\nsystem = ''\n", "a name without blanks"),
        ("[policy.run]\nquota = -5\n", "policy.run.quota: weighted tokens"),
        ("[policy.run]\nimage_tokens = -1\n", "policy.run.image_tokens: tokens for"),
        ("[policy.run]\nmodel = ' '\n", "policy.run.model: a model's name"),
        ("[policy.x]\nread = ['/no/such']\n", "policy.x.read: there is no '/no/such'"),
        ("[policy.x]\nroot = '/no/such'\n", "policy.x.root: there is no '/no/such'"),
        (
            "[policy.x]\nroot = 'config.toml'\n",
            "policy.x.root: 'config.toml' is not a directory",
        ),
        ("[policy.x]\nroot = ''\n", "policy.x.root: not a path: ''"),
        (
            "[policy.x]\nroot = 'config.toml/x'\n",
            "policy.x.root: cannot use 'config.toml/x': Not a directory",
        ),
        (
            "[policy.x]\nroot = '/usr'\n[policy.y]\nroot = '/usr/bin'\n",
            "policy.y.root: '/usr/bin' and the root '/usr' of policy 'x' lie in one",
        ),
        ("[sidecar.x]\n", "sidecar.x.kind: is missing"),
        ("[sidecar.x]\nkind = 'cobol'\n", "sidecar.x.kind: 'cobol' is none of c-cpp"),
        ("[sandbox.x]\nlayers = ['moat']\n", "sandbox.x.layers: no layer 'moat'"),
        ("[sandbox.x]\nrequired = ['moat']\n", "sandbox.x.required: no layer 'moat'"),
        (
            "[sandbox.x]\nlayers = ['landlock']\nunix_sockets = false\n",
            "sandbox.x.unix_sockets: false is kept by the layer 'seccomp'",
        ),
        ("[sandbox.auto]\n", "sandbox.auto: 'auto' is a profile of its own"),
        (
            "[sandbox.x]\nlayers = ['uid']\nrequired = ['seccomp']\n",
            "sandbox.x.required: 'seccomp' is required but not among the layers",
        ),
        (
            "[sandbox.x]\nlayers = ['pidns', 'uid']\nrequired = ['uid']\n",
            "sandbox.x.required: 'uid' is required and needs the layer 'mountns'",
        ),
        (
            "[sandbox.x]\nlayers = ['userns', 'pidns']\nrequired = ['pidns']\n",
            "sandbox.x.required: 'pidns' is required and needs the layer 'mountns'",
        ),
        ("[metrics]\nlisten = 'tcp://0.0.0.0:1'\n", "'0.0.0.0' is not on loopback"),
        ("[metrics]\ntypo = 1\n", "metrics.typo"),
        ("[policy.run]\nsandbox = 'castle'\n", "policy.run.sandbox: no profile"),
        (
            "[policy.run]\nnetwork = 'vpn'\n",
            "policy.run.network: none, host, learn or a list",
        ),
        (
            "[policy.run]\nsandbox = 'none'\nnetwork = 'none'\n",
            "policy.run.network: 'none' contradicts sandbox 'none'",
        ),
        (
            "[sandbox.x]\nrequired = ['netns']\n[policy.run]\nsandbox = 'x'\nnetwork = 'host'",
            "policy.run.network: 'host' contradicts sandbox 'x', which requires the",
        ),
        (
            "[sandbox.x]\nlayers = []\n[policy.run]\nsandbox = 'x'\nnetwork = 'none'",
            "policy.run.network: 'none' contradicts sandbox 'x', which keeps nobody from",
        ),
        (
            "policy.run = { sandbox = 'x', network = 'none' }\nsandbox.x.layers = ['pidns']",
            "the network without the layer netns or seccomp; add one to its layers",
        ),
        ("[policy.run]\ntools = ['a/b']\n", "policy.run.tools: not the name of a"),
        (
            "[policy.run]\nread = 'x'\n",
            "policy.run.read: expected an array, got a string",
        ),
        ("[policy.run]\ntypo = 1\n", "typo"),
        ("[typo]\n", "typo"),
        ("[limits]\nwrite = 'lots'\n", "limits.write: not a size: 'lots'"),
        ("[limits]\nline = '1M'\n", "limits.line"),
        ("[limits]\nclients_per_child = 0\n", "limits.clients_per_child"),
        ("[host]\ngrace = 'soon'\n", "host.grace: not a time: 'soon'"),
        (
            "[policy.run]\nlimits = { wishes = 3 }\n",
            "policy.run.limits.wishes: unknown",
        ),
        ("[policy.run]\npublish = 'never'\n", "policy.run.publish"),
        ("[policy.run]\ndurability = 'maybe'\n", "policy.run.durability"),
        ("not toml", "not TOML"),
        ("\xff", "not TOML"),
    ],
)
def test_what_a_configuration_cannot_mean_is_refused_with_file_and_key(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "config.toml").write_bytes(text.encode("latin-1"))
    words = ("run", "--config", "config.toml", "--", "touch", "done")
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said(said)
    assert outcome.said("'config.toml'")
    assert not (tmp_path / "done").exists()


def is_told(outcome: Outcome, text: str) -> bool:
    """Tell whether one of some warnings holds a text."""
    return sum(text in line for line in outcome.err.decode().splitlines()) == 1


# Asked for and not kept is a contradiction; nobody asked, and it is told.
def test_a_network_that_nothing_keeps_is_refused_or_told(tmp_path: Path) -> None:
    text = "[sandbox.x]\nlayers = ['landlock']\n"
    words = ("run", "--config", "c.toml", "--sandbox", "x")
    (tmp_path / "c.toml").write_text(text)
    outcome = sandhost(*words, "--network", "none", "--", "true", cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("--network: 'none' contradicts sandbox 'x'")
    left = "its children have the host's network: sandbox 'x' has neither the layer"
    outcome = sandhost(*words, "--", "true", cwd=tmp_path)
    assert outcome.status == 0
    assert is_told(outcome, f"--sandbox x: {left}")
    outcome = sandhost(*words, "--network", "host", "--", "true", cwd=tmp_path)
    assert outcome.status == 0
    assert not is_told(outcome, left)

    (tmp_path / "c.toml").write_text(f"{text}[policy.run]\nsandbox = 'x'\n")
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path)
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    assert is_told(outcome, f"c.toml: policy.run.network: warning: {left}")
    for more in ((), ("--sandbox", "x")):
        command = ("run", "--config", "c.toml", *more, "--", "true")
        outcome = sandhost(*command, cwd=tmp_path)
        assert outcome.status == 0
        assert is_told(outcome, f"policy.run.network: {left}")


# face.md: [policy.run] has what is not given, whatever else is given.
def test_the_network_of_a_policy_stands_beside_another_profile(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    for asked, profile in (("none", "none"), ("none", "x")):
        config.write_text(
            f"[sandbox.x]\nlayers = ['landlock']\n[policy.run]\nnetwork = '{asked}'\n"
        )
        options = ("--config", "c.toml", "--sandbox", profile)
        outcome = sandhost("run", *options, "--", "true", cwd=tmp_path)
        assert outcome.status == 125
        told = f"policy.run.network: '{asked}' contradicts sandbox '{profile}'"
        assert outcome.said(told)
    config.write_text("[policy.run]\nnetwork = 'host'\n")
    words = ("--config", "c.toml", "--sandbox", "auto", "--journal", "journal")
    assert sandhost("run", *words, "--", "true", cwd=tmp_path).status == 0
    lines = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    (spawned,) = [line for line in lines if line["event"] == "child.spawned"]
    assert spawned["isolation"]["network"] == "host"


# An operator that names it knows the rest: nothing looks like a mistake.
def test_a_policy_without_walls_is_told_nothing_of_its_network(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[policy.p]\nsandbox = 'none'\n")
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path)
    assert (outcome.status, outcome.out, outcome.err) == (
        0,
        b"c.toml: no faults\n",
        b"",
    )
