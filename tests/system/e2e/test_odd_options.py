"""Messages of `run` and a daemon about wrong or odd options and policies.

Each names the option or the key that its reader has written, and what to do.
"""

import json
import os
import resource
from pathlib import Path

import pytest

from supervisor.client import ControlError
from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

LEFT = (
    "its children have the host's network: sandbox 'open' has neither the layer netns nor"
    " seccomp; add one to its layers, or set network = 'host'"
)
LEASES = (
    "sandbox 'open' lacks seccomp: its children can take leases (F_SETLEASE) on their"
    " files, and the host waits up to 45 s to open one; add it to its layers"
)
PROFILES = (
    "[sandbox.open]\nlayers = ['landlock']\n"
    "[sandbox.shut]\nlayers = ['landlock', 'seccomp']\n"
    "[sandbox.mute]\nlayers = ['landlock', 'seccomp']\nunix_sockets = false\n"
)


def run(where: Path, text: str, *options: str) -> Outcome:
    """Run `true` with a configuration."""
    (where / "c.toml").write_text(text)
    return sandhost("run", "--config", "c.toml", *options, "--", "true", cwd=where)


def warned(outcome: Outcome) -> list[str]:
    """Return the warnings of a command that had no fault."""
    assert outcome.status == 0, outcome.err
    lines = [json.loads(line) for line in outcome.err.splitlines()]
    return [line["message"] for line in lines if line["level"] == "WARNING"]


OF_OPEN = [f"policy.run.network: {LEFT}", f"policy.run.sandbox: {LEASES}"]


# spec face: the command line goes before the configuration, for what is told as well.
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), OF_OPEN),
        (("--sandbox", "open"), OF_OPEN),
        (("--sandbox", "shut"), []),
        (("--sandbox", "auto"), []),
        (("--sandbox", "none"), []),
        (("--network", "host"), OF_OPEN[1:]),
    ],
    ids=["nothing", "the same", "shut", "auto", "none", "host"],
)
def test_run_warns_of_the_walls_that_its_child_has(
    tmp_path: Path, options: tuple[str, ...], told: list[str]
) -> None:
    text = f"{PROFILES}[policy.run]\nsandbox = 'open'\n"
    assert warned(run(tmp_path, text, *options)) == told


def test_run_warns_of_a_profile_that_it_was_given(tmp_path: Path) -> None:
    text = f"{PROFILES}[policy.run]\nsandbox = 'shut'\n[policy.b]\nsandbox = 'open'\n"
    others = [f"policy.b.network: {LEFT}", f"policy.b.sandbox: {LEASES}"]
    assert warned(run(tmp_path, text)) == others
    given = [f"--sandbox open: {LEFT}", f"--sandbox open: {LEASES}"]
    assert warned(run(tmp_path, text, "--sandbox", "open")) == given + others


# attack 41: what only the layer seccomp refuses is told where it is no layer.
def test_a_profile_without_a_filter_of_calls_is_warned_of(tmp_path: Path) -> None:
    text = (
        "[sandbox.open]\nlayers = ['landlock', 'netns']\n[policy.a]\nsandbox = 'open'\n"
    )
    (tmp_path / "c.toml").write_text(text)
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path)
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    assert outcome.said(f"c.toml: policy.a.sandbox: warning: {LEASES}")
    for layers in ("['landlock', 'netns', 'seccomp']", "['landlock', 'seccomp']"):
        (tmp_path / "c.toml").write_text(text.replace("['landlock', 'netns']", layers))
        assert sandhost("check-config", "c.toml", cwd=tmp_path).err == b""
    for profile in ("none", "auto", "required"):  # of "none" that is known
        (tmp_path / "c.toml").write_text(f"[policy.a]\nsandbox = '{profile}'\n")
        assert sandhost("check-config", "c.toml", cwd=tmp_path).err == b""


# attack 50: what keeps the working directory as it is, or not, is told.
@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ("'rlimits'", "neither the layer landlock nor mountns; add one to its layers"),
        (
            "'mountns', 'userns'",
            "none of landlock, pidns and uid to close /proc/PID/root",
        ),
        ("'mountns', 'userns', 'pidns'", ""),
        ("'mountns', 'userns', 'uid'", ""),
        ("'landlock'", ""),
    ],
)
def test_a_working_directory_that_nothing_keeps_is_warned_of(
    tmp_path: Path, layers: str, told: str
) -> None:
    (tmp_path / "c.toml").write_text(
        f"[sandbox.x]\nlayers = ['seccomp', {layers}]\n[policy.a]\nsandbox = 'x'\n"
    )
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path)
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    if told and (os.geteuid() == 0 or "mountns" not in layers):
        assert outcome.said("can change their working directory: sandbox 'x' has")
        assert outcome.said(told)
    else:
        assert outcome.err == b""


def test_run_warns_of_a_model_out_of_the_reach_of_its_walls(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key")
    (tmp_path / "key").chmod(0o600)
    text = f"{PROFILES}[llm]\napi_key_file = '{tmp_path}/key'\n"
    said = "--sandbox mute: its children have no way to the model but by FD 3: "
    (told,) = warned(run(tmp_path, text, "--sandbox", "mute"))
    assert told.startswith(said)
    assert warned(run(tmp_path, text, "--sandbox", "shut")) == []


def test_a_contradiction_names_who_has_said_it(tmp_path: Path) -> None:
    text = f"{PROFILES}[policy.run]\nsandbox = 'shut'\nnetwork = 'none'\n"
    for option, name in (
        ((), "policy.run.network"),
        (("--network", "none"), "--network"),
    ):
        for profile, how in (
            ("none", "choose another sandbox, or network = 'host'"),
            ("open", "add one to its layers, or set network = 'host'"),
        ):
            outcome = run(tmp_path, text, "--sandbox", profile, *option)
            assert outcome.status == 125
            assert outcome.said(
                f"{name}: 'none' contradicts sandbox {profile!r}, which"
            )
            assert outcome.said(how)


def test_a_limit_that_no_layer_keeps_names_who_has_said_it(tmp_path: Path) -> None:
    why = (
        "cpus: nothing keeps it in sandbox 'open': it takes the layer 'cgroup'; name a"
    )
    text = f"{PROFILES}[policy.run]\n"
    outcome = run(tmp_path, text, "--sandbox", "open", "--limit", "cpus=0.5")
    assert outcome.status == 125
    assert outcome.said(f"--limit: {why}")
    outcome = run(tmp_path, f"{text}limits.cpus = 0.5\n", "--sandbox", "open")
    assert outcome.status == 125
    assert outcome.said(f"policy.run.limits.{why}")
    words = ("--sandbox", "open", "--limit", "cpus=0.5")
    outcome = run(tmp_path, f"{text}limits.cpus = 0.5\n", *words)
    assert outcome.said(f"--limit: {why}")


@pytest.mark.parametrize("option", ["read", "write"])
def test_a_grant_that_is_not_there_names_its_option(
    tmp_path: Path, option: str
) -> None:
    path = str(tmp_path / "none")
    # A written path may be yet to be made, in a directory that is there.
    given = path if option == "read" else f"{path}/f"
    outcome = sandhost("run", f"--{option}", given, "--", "true")
    assert outcome.status == 125
    assert outcome.said(
        f"cannot start a child: cannot use {path!r}: No such file or directory (granted"
        f" by --{option}, or by {option} of its policy); name what is there, or make it"
        " first"
    )


@pytest.mark.slow
def test_what_is_gone_since_a_daemon_began_names_policy_and_key(tmp_path: Path) -> None:
    for name in ("granted", "root"):
        (tmp_path / name).mkdir()
    config = (
        f"[policy.a]\nsandbox = 'none'\nread = ['{tmp_path}/granted']\n"
        f"[policy.b]\nsandbox = 'none'\nroot = '{tmp_path}/root'\n"
    )
    with daemon(tmp_path, config) as it:
        for name in ("granted", "root"):
            (tmp_path / name).rmdir()
        said = (
            r"refused: cannot spawn x(?:: did not start)? \(policy 'a'\): cannot start a"
            r" child: cannot use '.*/granted': No such file or directory \(granted by --read, or by read of"
            r" its policy\); name what is there, or make it first$"
        )
        with pytest.raises(ControlError, match=said):
            it.client.spawn(["true"], name="x", policy="a")
        said = (
            r"refused: cannot spawn y(?:: did not start)? \(policy 'b'\): .*there is no"
            r" such root; make it first$"
        )
        with pytest.raises(ControlError, match=said):
            it.client.spawn(["true"], name="y", policy="b")
        (tmp_path / "root").touch()
        said = "the root is no directory; name another, or put a directory there$"
        with pytest.raises(ControlError, match=said):
            it.client.spawn(["true"], name="z", policy="b")
        assert "Child x did not start (policy 'a'): " in it.said()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (
            "files=9223372036854775808",
            "limit files is 9223372036854775808: at most 9223",
        ),
        ("bytes=99999999999999999999", "bytes is 99999999999999999999: at most 92233"),
        ("open_files=-1", "open_files: '-1'; write a whole number from 0 on"),
        ("processes=x", "processes: 'x'; write a whole number from 1 on"),
        (f"cpu={'9' * 32}", f"limit cpu is {'9' * 32}: at most 9223"),
        (f"bytes={'9' * 32}T", f"limit bytes is {'9' * 32}T: at most 9223"),
        ("cpus=100000", "cpus: '100000'; write a number from 0.01 to 9999.999"),
    ],
)
def test_a_limit_that_is_none_says_what_is_one(limit: str, said: str) -> None:
    outcome = sandhost("run", "--limit", limit, "--", "true")
    assert outcome.status == 125
    assert outcome.said(said)


def test_limits_may_be_as_large_as_the_kernel_counts() -> None:
    most = 2**63 - 1
    limits = f"bytes={most},files={most},file_size={most}"
    assert sandhost("run", "--limit", limits, "--", "true").status == 0


def test_what_has_no_effect_is_told(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = hard - 64  # kept by the host for itself
    text = (
        f"[limits]\nopen_files_per_client = {share + 1}\n"
        "[policy.a]\nmodel = 'm'\nquota = 5\ntools = ['go']\n"
        f"[policy.b]\nquota = 0\nlimits = {{ open_files = '{share + 1}' }}\n"
        f"[policy.run]\nlimits = {{ open_files = {share} }}\n"
    )
    (tmp_path / "c.toml").write_text(text)
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path)
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    none = "has no effect: there is no [llm] section"
    many = (
        f"{share + 1} is more than the {share} open files of all children together: the"
        f" host may have {hard} descriptors; raise ulimit -Hn of the host, or write less"
    )
    for key, why in (
        ("limits.open_files_per_client", many),
        ("policy.a.model", none),
        ("policy.a.quota", none),
        ("policy.a.tools", "has no effect: there is no [toolexec] section"),
        ("policy.b.limits.open_files", many),
    ):
        assert f"c.toml: {key}: warning: {why}".encode() in outcome.err
    assert outcome.err.count(b"\n") == 5
    shorter = text[text.index("[policy.run]") :]
    assert warned(run(tmp_path, shorter)) == []
    (told,) = warned(run(tmp_path, shorter, "--limit", f"open_files={share + 1}"))
    assert told.startswith(f"--limit: open_files: {many}")
    above = f"[policy.run]\nlimits = {{ open_files = '{share + 1}' }}\n"
    for written in (above, above.replace("'", "'00", 1)):
        (told,) = warned(run(tmp_path, written))
        assert told.startswith(f"policy.run.limits.open_files: {many}")
    # The same key beside it gets its own message.
    (told,) = warned(run(tmp_path, above, "--limit", f"open_files={share + 1}"))
    assert told.startswith(f"--limit: open_files: {many}")
    assert warned(run(tmp_path, above, "--limit", f"open_files={share}")) == []
    outcome = sandhost("run", "--limit", f"open_files={share + 1}", "--", "true")
    assert (outcome.status, outcome.said(f"--limit: open_files: {many}")) == (0, True)


def test_what_has_an_effect_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key")
    (tmp_path / "key").chmod(0o600)
    policy = "[policy.run]\nmodel = 'm'\nquota = 5\ntools = ['go']\n"
    sections = f"[llm]\napi_key_file = '{tmp_path}/key'\n[toolexec]\n"
    assert warned(run(tmp_path, sections + policy)) == []
    none = "has no effect: there is no [llm] section"
    assert warned(run(tmp_path, f"[toolexec]\n{policy}")) == [
        f"policy.run.model: {none}",
        f"policy.run.quota: {none}",
    ]


# A reload gives the warnings of a start.
@pytest.mark.slow
def test_a_reload_warns_of_what_was_not_there_before(tmp_path: Path) -> None:
    before = f"{PROFILES}[policy.a]\nmodel = 'm'\n"
    first = "policy.a.model: has no effect: there is no [llm] section"
    with daemon(tmp_path, before) as it:
        assert it.said().count(first) == 1
        with (tmp_path / "c.toml").open("a") as file:
            file.write("[policy.b]\nsandbox = 'open'\n")
        it.client.reload()
        assert it.said().count(f"policy.b.network: {LEFT}") == 1
        it.client.reload()
        assert it.said().count(f"policy.b.network: {LEFT}") == 1
        assert it.said().count(first) == 1


def test_what_a_profile_cannot_require_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "[sandbox.a]\nlayers = ['pidns']\nrequired = ['pidns']\n[policy.a]\nsandbox = 'a'\n"
        "[sandbox.auto]\n[policy.b]\nsandbox = 'x'\n"
    )
    outcome = sandhost("check-config", "--json", "c.toml", cwd=tmp_path)
    found = [(row["key"], row["reason"]) for row in json.loads(outcome.out)]
    how = "add it to the layers"
    assert found == [
        ("sandbox.a.required", f"'pidns' is required and needs the layer 'mountns'; {how}"),
        ("sandbox.auto", "'auto' is a profile of its own; choose another name"),
        ("policy.b.sandbox", "no profile 'x'; there are none, auto, required, a"),
    ]  # fmt: skip


def test_a_limit_of_another_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "[limits]\npayload_budget = '9999999999T'\n"
        "[child.c]\ncommand = ['/bin/true']\nlog = { max_size = '9999999999T' }\n"
        "[policy.p]\nlimits = { open_files = true, cpu = [] }\n"
    )
    outcome = sandhost("check-config", "--json", "c.toml", cwd=tmp_path)
    found = {row["key"]: row["reason"] for row in json.loads(outcome.out)}
    assert found == {
        "limits.payload_budget": "not a size: '9999999999T'; at most 9223372036854775807",
        "child.c.log.max_size": "not a size: '9999999999T'; at most 9223372036854775807",
        "policy.p.limits.open_files": "expected a number or a string, got a boolean",
        "policy.p.limits.cpu": "expected a number or a string, got an array",
    }


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A directory with a ring of links, a dead link, and two nested roots."""
    (tmp_path / "ring").symlink_to("ring")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("option", ["root", "read", "cwd"])
def test_what_cannot_be_used_says_what_to_do(places: Path, option: str) -> None:
    for path, how in (
        ("ring", "; name what is there: links go round in a ring"),
        ("x" * 300, "; name it by a shorter path"),
    ):
        outcome = sandhost("run", f"--{option}", path, "--", "true", cwd=places)
        assert outcome.status == 125
        assert outcome.said(how)


def test_a_configuration_that_cannot_be_used_says_what_to_do(places: Path) -> None:
    for words in (("check-config", "none"), ("run", "--config", "none", "--", "true")):
        outcome = sandhost(*words, cwd=places)
        assert outcome.said("No such file or directory; name what is there, or make it")
    (places / "c.toml").write_text(
        f"[policy.a]\nroot = '{places}/a'\nread = ['{places}/ring']\n"
        f"[policy.b]\nroot = '{places}/a/b'\nread = ['{places}/dangling']\n"
    )
    outcome = sandhost("check-config", "--json", "c.toml", cwd=places)
    found = {row["key"]: row["reason"] for row in json.loads(outcome.out)}
    assert found.keys() == {"policy.a.read", "policy.b.read", "policy.b.root"}
    assert found["policy.a.read"].endswith("there: links go round in a ring")
    assert "is a link that leads nowhere; mend it" in found["policy.b.read"]
    assert found["policy.b.root"].endswith("; choose another one")


# spec FL9: Ray takes an address; a name would be looked up by each node in its own way.
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--bind", "localhost"), "--bind: no IPv4 address of a machine: 'localhost'"),
        (("--bind", "0.0.0.0"), "--bind: no IPv4 address of a machine: '0.0.0.0'"),  # noqa: S104 - refused
        (("--bind", "::1"), "--bind: no IPv4 address of a machine: '::1'; write one"),
        (("--ports", "x"), "--ports: not a range: 'x'; write 20000-20100"),
        (("--ports", "20000-20001"), "--ports: '20000-20001' has too few ports"),
    ],
    ids=["a name", "every address", "of IPv6", "no range", "too few"],
)
def test_a_fleet_is_not_begun_at_odd_addresses(
    tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    outcome = sandhost("fleet", "up", *options, cwd=tmp_path)
    assert outcome.status == 2
    assert told in " ".join(outcome.err.decode().split())


# spec FL10
def test_no_child_of_a_fleet_works_in_a_directory_without_a_name() -> None:
    outcome = sandhost("fleet", "spawn", "--workspace", "", "--", "true")
    assert outcome.status == 2
    assert outcome.said("--workspace: it names no directory: ''; name one")
