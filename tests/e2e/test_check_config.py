"""`sandhost check-config F`: every fault at once, with file, key and reason."""

import json
import os
import resource
from pathlib import Path

import pytest

from tests.helpers import older
from tests.helpers.command import ENVIRONMENT, Outcome, sandhost, without
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

FAULTY = """
typo = 1
limits = 3
[host]
grace = "soon"
max_children = "many"
log_format = "xml"
color = true
[policy.run]
read = "x"
publish = "never"
[policy."two words"]
limits = { wishes = 3 }
[child.a]
command = []
policy = "nobody"
restart = "sometimes"
backoff = 3
after = ["b", "missing"]
stop_signal = "KILLER"
log = { max_size = "1", keep = -1, color = 1 }
[child.b]
command = ["true"]
after = ["a"]
[child.c]
policy = "run"
[child."../d"]
command = ["true"]
within = "0s"
env = { "A=B" = "c" }
"""

KEYS = {
    "typo",
    "limits",
    "host.grace",
    "host.max_children",
    "host.log_format",
    "host.color",
    "policy.run.read",
    "policy.run.publish",
    'policy."two words".limits.wishes',
    "child.a.command",
    "child.a.policy",
    "child.a.restart",
    "child.a.backoff",
    "child.a.after",
    "child.a.stop_signal",
    "child.a.log.max_size",
    "child.a.log.keep",
    "child.a.log.color",
    "child.c.command",
    'child."../d"',
    'child."../d".within',
    'child."../d".env."A=B"',
}


def check(where: Path, text: str, *options: str) -> Outcome:
    """Check a configuration in a directory of its own."""
    (where / "c.toml").write_text(text)
    return sandhost("check-config", *options, "c.toml", cwd=where)


# spec face: check-config tells every fault with file, key and reason; exit 2.
def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    outcome = check(tmp_path, FAULTY, "--json")
    assert outcome.status == 2
    faults = json.loads(outcome.out)
    assert {fault["key"] for fault in faults} >= KEYS
    # The ring is told at one of its members.
    assert any("wait for each other" in fault["reason"] for fault in faults)
    assert all(fault["file"] == "c.toml" and fault["reason"] for fault in faults)


def test_for_people_each_fault_is_one_line_on_stderr(tmp_path: Path) -> None:
    outcome = check(tmp_path, FAULTY)
    assert (outcome.status, outcome.out) == (2, b"")
    lines = outcome.err.decode().splitlines()
    for key in KEYS:
        start = f"sandhost check-config: c.toml: {key}: "
        assert any(line.startswith(start) for line in lines), key


@pytest.mark.parametrize(
    ("text", "status"),
    [("", 0), ("[child.a]\ncommand = ['true']\n", 0), ("[host\n", 2), ("\x00", 2)],
)
def test_a_good_file_is_0_and_no_toml_is_2(
    tmp_path: Path, text: str, status: int
) -> None:
    assert check(tmp_path, text).status == status


# What has no end, or none until somebody writes, is not waited for.
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("check-config",), 2),
        (("run", "--config"), 125),
        (("serve", "--config"), 1),
        (("shim", "bin", "--config"), 2),
    ],
)
@pytest.mark.parametrize(
    ("kind", "said"), [("pipe", "a pipe"), (".", "a directory"), ("/dev/zero", "a dev")]
)
def test_what_is_no_file_is_said(
    tmp_path: Path, words: tuple[str, ...], status: int, kind: str, said: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    more = ("--", "true") if words[0] == "run" else ()
    outcome = sandhost(*words, kind, *more, cwd=tmp_path)
    assert outcome.status == status
    assert outcome.said(f"it is {said}")
    assert outcome.said("and no file; write the configuration into one")


def test_nothing_is_a_configuration_without_faults() -> None:
    assert sandhost("check-config", "/dev/null").status == 0


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    with (tmp_path / "c.toml").open("wb") as file:
        file.truncate(1 << 40)
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said("it has more than 16777216 bytes")


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("payload_budget = '8M'", "8M is less than write (16M): what is longer than"),
        ("write = '1G'", "64M is less than write (1G): what is longer than"),
    ],
)
def test_payloads_that_never_fit_into_memory_are_told(
    tmp_path: Path, limits: str, said: str
) -> None:
    outcome = check(tmp_path, f"[limits]\n{limits}\n")
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    assert outcome.said(f"c.toml: limits.payload_budget: warning: {said}")
    words = ("run", "--config", "c.toml", "--", "true")
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == 0
    assert outcome.said(f"limits.payload_budget: {said}")


@pytest.mark.parametrize(
    ("section", "policy", "layers", "said"),
    [
        (
            "toolexec",
            "",
            "",
            "its children have no way to their tools: sandbox 'x' has",
        ),
        ("toolexec", "tools = []\n", "", ""),
        ("toolexec", "network = 'host'\n", "", ""),
        ("toolexec", "", ", 'netns'", ""),
        ("llm", "", "", "warning: its children have no way to the model but by FD 3: "),
        ("llm", "", ", 'netns'", ""),
    ],
)
# Bad input: a policy that contradicts itself. What FD 3 leads to is there in any case.
def test_a_profile_that_closes_every_way_is_told(
    tmp_path: Path, section: str, policy: str, layers: str, said: str
) -> None:
    profile = f"[sandbox.x]\nlayers = ['seccomp'{layers}]\nunix_sockets = false\n"
    text = f"[{section}]\n[policy.p]\nsandbox = 'x'\n{policy}{profile}"
    outcome = check(tmp_path, text)
    is_refused = bool(said) and not said.startswith("warning")
    assert outcome.status == (2 if is_refused else 0)
    if said:
        assert outcome.said(f"c.toml: policy.p.sandbox: {said}")
    else:
        assert outcome.err == b""
    if is_refused:
        (tmp_path / "c.toml").write_text(text.replace("policy.p", "policy.run"))
        outcome = sandhost("run", "--config", "c.toml", "--", "true", cwd=tmp_path)
        assert outcome.status == 125
        assert outcome.said(f"policy.run.sandbox: {said}")


def test_a_file_that_is_not_there_is_2() -> None:
    outcome = sandhost("check-config", "/nonexistent/c.toml")
    assert outcome.status == 2
    assert outcome.said("No such file")


def test_several_faults_are_counted_where_there_is_room_for_one(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(FAULTY)
    outcome = sandhost("run", "--config", "c.toml", "--", "true", cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("more: sandhost check-config tells")


def test_a_child_may_have_as_many_open_files_as_the_limits_say(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[limits]\nopen_files_per_client = 1\n")
    script = "for n in a b; do printf 'OPEN %s w false\\n' $n >&3; read -r r <&3; echo $r; done"
    words = ("run", "--config", "c.toml", "--", "sh", "-c", script)
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.out.splitlines()[0] == b"OK 1000"
    assert outcome.out.splitlines()[1].startswith(b"ERROR")


def faults(outcome: Outcome) -> list[tuple[str, str]]:
    """Return (key, reason) of each fault."""
    return [(row["key"], row["reason"]) for row in json.loads(outcome.out)]


# spec face: a root is a directory that is there; a child with another one would find
# every name "not available".
def test_a_root_is_a_directory_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "file").touch()
    text = "".join(
        f"[policy.{name}]\nroot = '{name}'\n" for name in ("root", "file", "gone")
    )
    assert faults(check(tmp_path, text, "--json")) == [
        ("policy.file.root", "'file' is not a directory"),
        ("policy.gone.root", "there is no 'gone'; make it first"),
    ]
    outcome = sandhost("serve", "--config", "c.toml", cwd=tmp_path)
    assert outcome.status == 1
    assert b"cannot use c.toml: policy.file.root: 'file' is not" in outcome.err


# spec face: no root lies in another policy's, by whatever name; what only reads so does not.
@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [
        ("in", "in/sub", True),
        ("in/sub", "in", True),
        ("in", "link/sub", True),
        ("link", "in/sub", True),
        ("in", "out/../in/sub", True),
        ("deep/sub", "in", True),
        ("in", "in/../out", False),
        ("in", "link", False),  # one root for two policies
        ("in", "in-evil", False),
        ("in", "in/away", False),  # a link within that leads out
    ],
)
def test_no_root_lies_in_another_one_whatever_it_is_called(
    tmp_path: Path, one: str, other: str, *, refused: bool
) -> None:
    for name in ("in/sub", "out", "in-evil"):
        (tmp_path / name).mkdir(parents=True)
    for link, target in (("link", "in"), ("deep", "link"), ("in/away", "../out")):
        (tmp_path / link).symlink_to(target)
    text = f"[policy.a]\nroot = '{one}'\n[policy.b]\nroot = '{other}'\n"
    outcome = check(tmp_path, text, "--json")
    if not refused:
        assert outcome.status == 0
        return
    ((key, reason),) = faults(outcome)
    assert key == "policy.b.root"
    assert (
        f"'{tmp_path}/{other}' and the root '{tmp_path}/{one}' of policy 'a'" in reason
    )


@pytest.mark.parametrize(
    ("host", "policy", "said"),
    [
        (
            "state_dir = 'A/state'",
            "root = 'A'",
            "holds [host] state_dir ('{}/A/state')",
        ),
        ("state_dir = 'A/state'", "root = 'link'", "holds [host] state_dir"),
        ("state_dir = 'A/new/state'", "write = ['A']", "holds [host] state_dir"),
        ("state_dir = 'A/new/state'", "write = ['A/new']", "holds [host] state_dir"),
        ("state_dir = 'A/state'", "read = ['A/state']", "holds [host] state_dir"),
        ("state_dir = 'A'", "root = 'A/logs'", "holds what [host] state_dir is for"),
        (
            "state_dir = 'A'",
            "write = ['A/logs/new']",
            "lies in what [host] state_dir",
        ),
        (
            "state_dir = 'A'",
            "read = ['A/journal/file']",
            "lies in what [host] state_dir",
        ),
        ("state_dir = 'A'", "root = 'A/state'", ""),
        ("state_dir = 'A'", "write = ['A/state/..']", "holds [host] state_dir"),
        ("runtime_dir = 'A/run'", "root = 'A'", "holds [host] runtime_dir"),
        ("runtime_dir = 'A/run'", "read = ['A']", ""),
        ("control = 'A/socket'", "write = ['A']", "holds [host] control"),
        ("control = 'A/socket'", "read = ['A']", ""),
        ("state_dir = 'A/state'", "root = 'B'", ""),
        ("state_dir = 'A/new'", "write = ['A/state', 'A/newer']", ""),
    ],
)
def test_what_is_a_daemons_own_is_no_root_and_no_grant(
    tmp_path: Path, host: str, policy: str, said: str
) -> None:
    for name in ("A/state", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "A/file").touch()
    (tmp_path / "link").symlink_to("A")
    for name in ("logs", "scratch", "journal"):
        (tmp_path / "A" / name).mkdir()
    (tmp_path / "A/journal/file").touch()
    outcome = check(tmp_path, f"[host]\n{host}\n[policy.a]\n{policy}\n", "--json")
    if not said:
        assert outcome.status == 0
        return
    ((key, reason),) = faults(outcome)
    assert key == f"policy.a.{policy.split(maxsplit=1)[0]}"
    assert said.format(tmp_path) in reason
    for words, status in ((("serve",), 1), (("run", "--", "true"), 125)):
        command = (words[0], "--config", "c.toml", *words[1:])
        refused = sandhost(*command, cwd=tmp_path)
        assert refused.status == status
        assert refused.said(f"{key}: {reason}")


# Where nothing is written they are the usual ones of whoever starts the daemon.
def test_the_usual_places_of_a_daemon_are_no_grant_either(tmp_path: Path) -> None:
    places = {"STATE_DIRECTORY": f"{tmp_path}/lib/s", "RUNTIME_DIRECTORY": "/run/x"}
    text = f"[policy.run]\nread = ['{tmp_path}']\n"
    env = {**ENVIRONMENT, **places}
    (tmp_path / "c.toml").write_text(f"{text}[child.a]\ncommand = ['true']\n")
    outcome = sandhost("check-config", "--json", "c.toml", cwd=tmp_path, env=env)
    ((key, reason),) = faults(outcome)
    assert key == "policy.run.read"
    assert f"'{tmp_path}' holds [host] state_dir ('{tmp_path}/lib/s')" in reason
    # There is no daemon that would have them.
    words = ("run", "--config", "c.toml", "--", "true")
    assert sandhost(*words, cwd=tmp_path, env=env).status == 0
    (tmp_path / "c.toml").write_text(text)  # nothing says that it is a daemon's
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, env=env)
    assert (outcome.status, outcome.err) == (0, b"")
    assert sandhost("serve", "--config", "c.toml", cwd=tmp_path, env=env).status == 1


# A ring of links is a fault of the file, and none of this program's.
def test_a_ring_of_links_is_told(tmp_path: Path) -> None:
    (tmp_path / "ring").symlink_to("ring")
    for policy in ("root = 'ring'", "read = ['ring']"):
        outcome = check(tmp_path, f"[policy.a]\n{policy}\n")
        assert outcome.status == 2
        assert outcome.said(f"policy.a.{policy.split()[0]}: ")
    # That is a file which the child may make, as long as nobody looks.
    assert check(tmp_path, "[policy.a]\nwrite = ['ring']\n").status == 0


# Two policies may work on one thing, and that is easily more than was meant.
@pytest.mark.parametrize(
    ("policies", "key", "said"),
    [
        ("a.root = 'A'\nb.root = 'link'", "b.root", "'{}/link' is the root '{}/A' of"),
        ("a.root = 'A'\nb.write = ['A/sub']", "b.write", "'{}/A/sub' lies in the root"),
        ("a.root = 'A'\nb.write = ['A/new']", "b.write", "'{}/A/new' lies in the root"),
        ("b.write = ['A']\na.root = 'A/sub'", "b.write", "'{}/A' holds the root"),
        ("a.root = 'A'\nb.write = ['A']", "b.write", "'{}/A' is the root"),
        ("a.root = 'A'\nb.read = ['A/sub']", "", ""),
        ("a.root = 'A'\na.write = ['A/sub']", "", ""),
        ("a.root = 'A'\nb.write = ['B']\nb.root = 'B'", "", ""),
    ],
)
def test_a_policy_that_can_change_what_is_anothers_is_told(
    tmp_path: Path, policies: str, key: str, said: str
) -> None:
    for name in ("A/sub", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("A")
    outcome = check(tmp_path, f"[policy]\n{policies}\n")
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    if not key:
        assert outcome.err == b""
        return
    text = said.format(tmp_path, tmp_path)
    assert outcome.said(f"c.toml: policy.{key}: warning: {text}")
    assert outcome.said(": its children can change what policy a's children have;")
    with daemon(tmp_path, f"[policy]\n{policies}\n") as running:
        assert f"policy.{key}: {text}" in running.said()
        assert running.end() == 0


@pytest.mark.parametrize(
    ("option", "status", "said"),
    [
        (
            ("--root", "A/sub"),
            125,
            "--root: '{0}/A/sub' and the root '{0}/A' of policy",
        ),
        (("--root", "."), 125, "--root: '{0}' and the root '{0}/A' of policy 'a' lie"),
        (("--root", "A"), 0, "--root: '{0}/A' is the root '{0}/A' of policy 'a': its"),
        (("--write", "A/sub"), 0, "--write: '{0}/A/sub' lies in the root '{0}/A' of"),
        (("--root", "R/sub"), 0, ""),  # its own gives way
        (("--root", "B"), 0, ""),
        (("--read", "A/sub"), 0, ""),
    ],
)
def test_an_option_of_run_is_looked_at_beside_the_other_policies(
    tmp_path: Path, option: tuple[str, ...], status: int, said: str
) -> None:
    for name in ("A/sub", "R/sub", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "c.toml").write_text("[policy]\na.root = 'A'\nrun.root = 'R'\n")
    words = ("run", "--config", "c.toml", *option, "--", "true")
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == status
    if said:
        assert outcome.said(said.format(tmp_path))
    else:
        assert outcome.err == b""


def test_a_profile_may_require_what_its_layers_carry(tmp_path: Path) -> None:
    text = (
        "[sandbox.a]\nlayers = ['mountns', 'uid']\nrequired = ['uid']\n"
        "[sandbox.b]\nrequired = ['pidns']\n"
        "[sandbox.c]\nlayers = ['pidns', 'seccomp']\nrequired = ['seccomp']\n"
        # Those are in every profile, named or not.
        "[sandbox.d]\nlayers = []\nrequired = ['no_new_privs', 'capabilities']\n"
    )
    assert check(tmp_path, text).status == 0


def test_a_limit_that_nobody_keeps_in_a_profile_is_told(tmp_path: Path) -> None:
    text = "[sandbox.small]\nlayers = ['landlock', 'rlimits']\n"
    for name, sandbox in (("a", "small"), ("b", "none"), ("c", "auto")):
        text += f"[policy.{name}]\nsandbox = '{sandbox}'\nlimits = {{ cpus = 0.5 }}\n"
    why = "it takes the layer 'cgroup'; name a profile that has it, or leave the limit out"
    assert faults(check(tmp_path, text, "--json")) == [
        ("policy.a.limits.cpus", f"nothing keeps it in sandbox 'small': {why}"),
        ("policy.b.limits.cpus", f"nothing keeps it in sandbox 'none': {why}"),
    ]


@pytest.mark.parametrize(
    ("number", "layer"), [(444, "landlock"), (317, "seccomp")], ids=["444", "317"]
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_a_profile_that_this_kernel_cannot_give_is_told(
    tmp_path: Path, number: int, layer: str
) -> None:
    text = f"[sandbox.a]\nrequired = ['{layer}']\n[sandbox.b]\nlayers = ['{layer}']\n"
    for name, profile in zip("abcd", ("a", "b", "required", "auto"), strict=True):
        text += f"[policy.{name}]\nsandbox = '{profile}'\n"
    (tmp_path / "c.toml").write_text(text)
    words = ("check-config", "--json", str(tmp_path / "c.toml"))
    assert sandhost(*words).status == 0
    outcome = sandhost(*words, wrapper=older.without(number, 38))
    assert outcome.status == 2
    faults = json.loads(outcome.out)
    assert [fault["key"] for fault in faults] == [
        "policy.a.sandbox",
        "policy.c.sandbox",
    ]
    why = (
        f"'{layer}', which is required, is missing: Function not implemented; it takes"
    )
    assert all(fault["reason"].startswith(why) for fault in faults)


@pytest.mark.parametrize("key", ["read = ['{}']", "write = ['{}']", "root = '{}'"])
def test_a_path_that_cannot_even_be_looked_at_is_a_fault_as_any_other(
    tmp_path: Path, key: str
) -> None:
    text = f"[policy.a]\n{key.format('x' * 300)}\n"
    ((where, reason),) = faults(check(tmp_path, text, "--json"))
    assert where == f"policy.a.{key.split(maxsplit=1)[0]}"
    assert reason.endswith("File name too long")


def test_every_ring_of_children_is_told(tmp_path: Path) -> None:
    after = {"a": "b", "b": "ac", "c": "b", "d": "e", "e": "d", "own": ["own"]}
    text = "".join(
        f"[child.{name}]\ncommand = ['true']\nafter = {list(others)}\n"
        for name, others in after.items()
    )
    found = faults(check(tmp_path, text, "--json"))
    rings = {frozenset(reason.split(": ")[1].split(" after ")) for _, reason in found}
    assert rings == {frozenset(ring) for ring in ("ab", "bc", "de", ["own"])}
    assert len(found) == len(rings)
    for key, reason in found:
        assert key == f"child.{reason.split(': ')[1].split(' ')[0]}.after"


def test_more_rings_than_anybody_mends_are_not_all_looked_for(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(40)]
    text = "".join(
        f"[child.{name}]\ncommand = ['true']\nafter = {names}\n" for name in names
    )
    assert len(faults(check(tmp_path, text, "--json"))) == 100


# spec face: a directory that is not there would fail each start of the child.
def test_a_childs_directory_is_one_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    text = "".join(
        f"[child.{name}]\ncommand = ['true']\ncwd = '{name}'\n"
        for name in ("there", "file", "gone")
    )
    assert faults(check(tmp_path, text, "--json")) == [
        ("child.file.cwd", "'file' is not a directory"),
        ("child.gone.cwd", "there is no 'gone'; make it first"),
    ]


# Else the host would say so as it begins, and without the key.
@pytest.mark.parametrize("backend", ["local", "docker"])
def test_a_workspace_is_a_directory_that_is_there(tmp_path: Path, backend: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    image = "image = 'i'\n" if backend == "docker" else ""
    text = "".join(
        f"[sidecar.{name}]\nkind = 'go'\nbackend = '{backend}'\n{image}"
        f"workspace = '{tmp_path / name}'\n"
        for name in ("there", "file", "gone")
    )
    assert faults(check(tmp_path, text, "--json")) == [
        ("sidecar.file.workspace", f"'{tmp_path}/file' is not a directory"),
        ("sidecar.gone.workspace", f"there is no '{tmp_path}/gone'; make it first"),
    ]


# What a container needs is not asked of what is none.
def test_a_backend_that_there_is_not_is_the_only_fault(tmp_path: Path) -> None:
    text = "[sidecar.s]\nkind = 'go'\nbackend = 'lxc'\n"
    ((key, _),) = faults(check(tmp_path, text, "--json"))
    assert key == "sidecar.s.backend"


# A configuration is TOML, whose words for its types are not Python's.
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "[host]\ngrace = 5\n",
            "expected a string, got an integer; write it in quotes",
        ),
        ("[host]\nmax_children = '5'\n", "expected an integer, got a string"),
        ("[llm]\nendpoint = 'yes'\n", "expected a boolean, got a string"),
        ("[policy.a]\nread = 'x'\n", "expected an array, got a string"),
        (
            "[policy.a]\nread = [1]\n",
            "expected a string, got an integer; write it in quotes",
        ),
        ("[child]\na = 1\n", "expected a table, got an integer"),
        ("[llm]\ntemperature = 'x'\n", "expected a number, got a string"),
        (
            "[policy.a]\nlimits = { bytes = true }\n",
            "expected a number or a string, got a boolean",
        ),
    ],
)
def test_a_value_of_another_type_is_told_in_the_words_of_toml(
    tmp_path: Path, text: str, reason: str
) -> None:
    ((_, told),) = faults(check(tmp_path, text, "--json"))
    assert told == reason


def test_every_limit_that_cannot_be_is_told_with_its_own_key(tmp_path: Path) -> None:
    limits = (
        "{ memory = '999999999T', cpu = 0, processes = 0, file_size = '8388608T',"
        " cpus = 0, open_files = -1, files = 0, bytes = 0, 'cpu=1,cpus' = 2 }"
    )
    sidecar = "[sidecar.s]\nkind = 'node'\nlimits = { memory = 1, files = 2, cpu = 1 }"
    text = f"[limits]\ndeadline = '0s'\n[policy.p]\nlimits = {limits}\n{sidecar}\n"
    found = dict(faults(check(tmp_path, text, "--json")))
    assert list(found) == [
        "limits.deadline",
        "policy.p.limits.memory",
        "policy.p.limits.cpu",
        "policy.p.limits.processes",
        "policy.p.limits.file_size",
        "policy.p.limits.cpus",
        "policy.p.limits.open_files",
        'policy.p.limits."cpu=1,cpus"',
        "sidecar.s.limits.memory",
        "sidecar.s.limits.files",
    ]
    assert "at most 9223372036854775807" in found["policy.p.limits.memory"]
    assert "nothing starts with less than 1" in found["policy.p.limits.cpu"]


def test_a_limit_above_the_hosts_own_is_told(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = 1000 if hard == resource.RLIM_INFINITY else min(hard, 1000)
    text = f"[policy.p]\nlimits = {{ processes = {most + 1} }}\n"
    (tmp_path / "c.toml").write_text(text)
    words = ("check-config", "--json", "c.toml")
    wrapper = ("prlimit", f"--nproc={most}", *without("sys_resource"))
    outcome = sandhost(*words, cwd=tmp_path, wrapper=wrapper)
    ((key, reason),) = faults(outcome)
    assert key == "policy.p.limits.processes"
    assert f"the host's own hard limit is {most}" in reason
