"""`sandhost check-config F`: every fault at once, with file, key and reason."""

import json
import os
import resource
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, Outcome, sandhost, without
from tests.system.e2e import older
from tests.system.e2e.fewer import allowing

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


# An input without end, or without a writer, is not waited for.
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("check-config",), 2),
        (("run", "--config"), 125),
        (("serve", "--config"), 78),
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
        ("payload_budget = '31M'", "half of 31M, the part of one child, is less than"),
        ("write = '1G'", "half of 64M, the part of one child, is less than write (1G)"),
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
            "[toolexec]",
            "",
            "",
            "its children have no way to their tools: sandbox 'x' has",
        ),
        ("[toolexec]", "tools = []\n", "", ""),
        ("[toolexec]", "network = 'host'\n", "", ""),
        ("[toolexec]", "", ", 'netns'", ""),
        (
            "[toolexec]\nlisten = ['unix']",
            "network = 'host'\n",
            "",
            "warning: its children have no way to their tools: sandbox 'x' has unix_",
        ),
        ("[toolexec]\nlisten = ['unix']", "", ", 'netns'", ""),
        (
            "[llm]",
            "",
            "",
            "warning: its children have no way to the model but by FD 3: ",
        ),
        ("[llm]", "", ", 'netns'", ""),
    ],
)
# Bad input: a policy that contradicts itself. The root of FD 3 is there in any case.
def test_a_profile_that_closes_every_way_is_told(
    tmp_path: Path, section: str, policy: str, layers: str, said: str
) -> None:
    profile = (
        f"[sandbox.x]\nlayers = ['landlock', 'seccomp'{layers}]\nunix_sockets = false\n"
    )
    text = f"{section}\n[policy.p]\nsandbox = 'x'\n{policy}{profile}"
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


# A user that is not root makes a net namespace in a user namespace, or none.
@pytest.mark.parametrize(
    "network", ["", "network = 'none'\n"], ids=["usual", "written"]
)
def test_a_way_through_a_namespace_that_cannot_be_made_is_none(
    tmp_path: Path, network: str
) -> None:
    profile = (
        "[sandbox.x]\nlayers = ['landlock', 'seccomp', 'netns']\nunix_sockets = false\n"
    )
    policy = f"[policy.run]\nsandbox = 'x'\n{network}"
    words, nobody = ("c.toml", "--", "true"), allowing("", uid=1000)
    for section in ("[toolexec]\n", "[llm]\n"):
        (tmp_path / "c.toml").write_text(section + policy + profile)
        outcome = sandhost("check-config", "c.toml", cwd=tmp_path, wrapper=nobody)
        to = "their tools" if section == "[toolexec]\n" else "the model but by FD 3"
        assert outcome.said(f"its children have no way to {to}: sandbox 'x' has unix_")
        assert outcome.said("where the host is not root the layer netns takes userns")
        assert outcome.status == (2 if section == "[toolexec]\n" else 0)
        started = sandhost("run", "--config", *words, cwd=tmp_path, wrapper=nobody)
        assert started.status == (125 if section == "[toolexec]\n" else 0)
    text = (section + policy + profile).replace("'netns'", "'netns', 'userns'")
    (tmp_path / "c.toml").write_text(f"[toolexec]\n{text}")
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, wrapper=nobody)
    assert (outcome.status, outcome.err) == (0, b"")


# spec E1: in the host's network it has no namespace to listen in, whatever its layers are;
# who starts the host may give it a port, so nothing is refused before.
@pytest.mark.parametrize(
    ("listen", "policy", "is_told"),
    [
        ("'unix'", "", True),
        ("'unix'", "tools = []", False),
        ("'unix', 'tcp://127.0.0.1:0'", "", False),
    ],
)
def test_a_profile_that_closes_the_way_in_the_hosts_network_is_told(
    tmp_path: Path, listen: str, policy: str, *, is_told: bool
) -> None:
    profile = "layers = ['landlock', 'seccomp', 'netns']\nunix_sockets = false\n"
    text = f"[toolexec]\nlisten = [{listen}]\n[sandbox.x]\n{profile}"
    text += f"[policy.run]\nsandbox = 'x'\nnetwork = 'host'\n{policy}\n"
    outcome = check(tmp_path, text)
    assert outcome.status == 0
    words = ("run", "--config", "c.toml", "--", "true")
    if not is_told:
        assert outcome.err == b""
        assert sandhost(*words, cwd=tmp_path).status == 0
        return
    said = "policy.run.sandbox: warning: its children have no way to their tools: "
    assert outcome.said(f"c.toml: {said}sandbox 'x' has")
    assert sandhost(*words, cwd=tmp_path).status == 125
    env = {**ENVIRONMENT, "AIFO_TOOLEEXEC_BIND_HOST": "127.0.0.1"}
    assert sandhost(*words, cwd=tmp_path, env=env).status == 0


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


# A group keeps nothing of who can leave it.
@pytest.mark.parametrize(
    ("layers", "is_root", "is_kept"),
    [
        ("'seccomp'", True, False),
        ("'seccomp', 'landlock'", True, True),
        ("'seccomp', 'mountns', 'pidns'", True, True),
        ("'seccomp', 'mountns', 'pidns'", False, False),  # it has neither
        ("'seccomp', 'mountns', 'pidns', 'userns'", False, True),
        ("'mountns', 'uid'", True, True),
        ("'mountns', 'uid', 'userns'", False, False),  # nor a user to give
    ],
)
def test_a_limit_that_a_group_keeps_takes_what_keeps_a_child_in_it(
    tmp_path: Path, layers: str, *, is_root: bool, is_kept: bool
) -> None:
    profile = f"[sandbox.small]\nlayers = ['cgroup', {layers}]\n"
    policy = (
        "[policy.a]\nsandbox = 'small'\nnetwork = 'host'\nlimits = { cpus = 0.5 }\n"
    )
    (tmp_path / "c.toml").write_text(profile + policy)
    if is_root and os.geteuid() != 0:
        pytest.skip("a user namespace's root has no user to give")
    wrapper = () if is_root else allowing("", uid=1000)
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, wrapper=wrapper)
    assert outcome.status == (0 if is_kept else 2)
    if not is_kept:
        text = (
            "policy.a.limits.cpus: nothing keeps it in sandbox 'small': its children can"
            " leave their groups, for want of landlock with seccomp or mountns, mountns"
            " with uid, or mountns with pidns and seccomp; add such layers, or leave the"
        )
        assert text in outcome.err.decode()  # beside warnings of what else it lacks


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
    assert reason.endswith("File name too long; name it by a shorter path")


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


NETWORKED = (
    "c.toml: sidecar.s.start: warning: its command has the network and works where"
    " children of policy 'p' write, which have none: they can send by it"
)


# attack 49: what children leave in a shared workspace the sidecar's command may act on.
@pytest.mark.parametrize(
    ("sidecar", "policy", "is_told"),
    [
        ("start = ['true']", "", True),
        ("start = ['true']", "network = 'none'", True),
        ("start = ['true']", "network = 'host'", False),
        ("start = ['true']", "sandbox = 'none'", False),
        ("start = ['true']", "tools = []", False),
        ("", "", False),
        ("start = ['true']\nbackend = 'docker'\nimage = 'i'", "", True),
    ],
)
def test_a_command_with_the_network_beside_children_without_is_told(
    tmp_path: Path, sidecar: str, policy: str, *, is_told: bool
) -> None:
    (tmp_path / "w").mkdir()
    shared = f"[toolexec]\n[sidecar.s]\nkind = 'go'\n{sidecar}\n"
    text = f"[policy.p]\n{policy}\n{shared}workspace = '{tmp_path}/w'\n"
    outcome = check(tmp_path, text)
    assert outcome.status == 0
    assert bool(outcome.err) == is_told
    assert not is_told or outcome.said(NETWORKED)
    if (
        "docker" not in sidecar
    ):  # which needs a workspace; alone it meets nobody's files
        assert check(tmp_path, f"[policy.p]\n{policy}\n{shared}").err == b""


# spec MD1: what `env` sets wins, and a warning says that the door is then not used.
@pytest.mark.parametrize(
    ("endpoint", "backend", "told"),
    [
        ("true", "", ["sidecar.s.env", "child.c.env"]),
        ("true", "backend = 'docker'\nimage = 'i'", ["child.c.env"]),
        ("false", "", []),
    ],
)
def test_a_variable_that_leads_past_the_endpoint_is_told(
    tmp_path: Path, endpoint: str, backend: str, told: list[str]
) -> None:
    (tmp_path / "w").mkdir()
    env = "env = { OPENAI_BASE_URL = 'http://other/v1', A = 'b' }"
    text = (
        f"[llm]\nbase_url = 'http://127.0.0.1:1/v1'\nendpoint = {endpoint}\n"
        f"[toolexec]\n[sidecar.s]\nkind = 'go'\nworkspace = '{tmp_path}/w'\n{backend}\n"
        f"{env}\n[child.c]\ncommand = ['/bin/true']\n{env}\n"
    )
    outcome = check(tmp_path, text)
    assert outcome.status == 0
    lines = [line for line in outcome.err.decode().splitlines() if "OPENAI" in line]
    said = "OPENAI_BASE_URL is set here and wins, so the model's endpoint is not used"
    assert [line.split(": ")[2] for line in lines] == told
    assert all(f": warning: {said}" in line for line in lines)


# The needs of a container are not asked of other sidecars.
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


def test_a_crash_loop_without_an_end_is_told(tmp_path: Path) -> None:
    section = "[child.a]\ncommand = ['false']\nrestart = 'always'\n"
    assert not check(tmp_path, section).err
    outcome = check(tmp_path, section + "within = '10s'\n")
    assert outcome.status == 0
    assert outcome.said("child.a.within: warning: a child that always fails is never")


# A child is looked at whole, whatever one of its keys is.
def test_a_key_of_a_wrong_type_hides_no_other_fault(tmp_path: Path) -> None:
    text = """
        [child.a]
        command = "true"
        restart = "sometimes"
        policy = "nobody"
        [child.b]
        stop_signal = "KILLER"
        after = ["a"]
        [child.c]
        command = ["true"]
        after = ["a", "b", "d", "e"]
        [child.d]
        x = 3
        [toolexec.notify]
        command = "say"
        timeout = "soon"
        [sidecar.s]
        kind = 3
        backend = "lxc"
        [llm]
        presets = { p = { tools = true } }
    """
    text = "\n".join(line.strip() for line in text.splitlines())
    told = faults(check(tmp_path, text, "--json"))
    assert sorted(key for key, _ in told) == [
        "child.a.command",
        "child.a.policy",
        "child.a.restart",
        "child.b.command",
        "child.b.stop_signal",
        "child.c.after",
        "child.d.command",
        "child.d.x",
        "llm.presets.p.system",
        "llm.presets.p.tools",
        "sidecar.s.backend",
        "sidecar.s.kind",
        "toolexec.notify.command",
        "toolexec.notify.timeout",
    ]
    reasons = dict(told)
    assert reasons["child.a.command"] == "expected an array, got a string"
    assert reasons["child.b.command"] == reasons["llm.presets.p.system"] == "is missing"
    assert reasons["child.c.after"] == "there is no child 'e'"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("child.b = 3\n[child.c]\ncommand = ['true']\nafter = ['b']", "child.b"),
        ("policy = 3\n[child.c]\ncommand = ['true']\npolicy = 'p'", "policy"),
        ("policy.p = 3\n[child.c]\ncommand = ['true']\npolicy = 'p'", "policy.p"),
        ("sandbox = 3\n[policy.p]\nsandbox = 'x'", "sandbox"),
        ("sandbox.x = 3\n[policy.p]\nsandbox = 'x'", "sandbox.x"),
    ],
)
def test_what_is_no_table_is_the_only_fault(
    tmp_path: Path, text: str, told: str
) -> None:
    assert faults(check(tmp_path, text, "--json")) == [
        (told, "expected a table, got an integer")
    ]


@pytest.mark.parametrize("key", ["runtime_dir", "state_dir", "control"])
def test_a_relative_place_of_a_daemon_is_told(tmp_path: Path, key: str) -> None:
    outcome = check(tmp_path, f"[host]\n{key} = 'there'\n")
    assert outcome.status == 0
    assert outcome.said(
        f"c.toml: host.{key}: warning: 'there' depends on where the daemon is started;"
        " write an absolute path"
    )
    assert check(tmp_path, f"[host]\n{key} = '{tmp_path}/there'\n").err == b""


# One look tells both; what a fault stands at is not told twice.
def test_warnings_are_told_beside_faults(tmp_path: Path) -> None:
    text = """
        typo = 1
        [host]
        state_dir = "there"
        control = ""
        [limits]
        write = "much"
        [policy.p]
        quota = 5
        limits = { open_files = "x" }
        [child.a]
        command = ["nowhere"]
        [child.b]
        command = []
        restart = "always"
        backoff = 3
        [child.c]
        command = ["false"]
        restart = "always"
        within = "10s"
        [toolexec.notify]
        command = [""]
        [llm]
        api_key_file = "$CREDENTIALS_DIRECTORY/key"
    """
    text = "\n".join(line.strip() for line in text.splitlines())
    outcome = check(tmp_path, text)
    assert outcome.status == 2
    lines = outcome.err.decode().splitlines()
    keys = [line.split(": ")[2] for line in lines if ": warning: " in line]
    assert sorted(keys) == [
        "child.a.command",
        "child.c.within",
        "host.state_dir",
        "llm.api_key_file",
    ]
    for key in ("typo", "host.control", "limits.write", "child.b.command"):
        assert any(line.split(": ")[2] == key for line in lines), key


NOWHERE = "cannot start 'nowhere': No such file or directory in any directory of PATH"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[child.a]\ncommand = ['nowhere']", f"child.a.command: warning: {NOWHERE}"),
        (
            "[child.a]\ncommand = ['/nowhere/x']",
            "child.a.command: warning: cannot start '/nowhere/x': No such file",
        ),
        (
            "[child.a]\ncommand = ['/etc/passwd']",
            "child.a.command: warning: cannot start '/etc/passwd': Permission denied",
        ),
        (
            "[child.a]\ncommand = ['./x']\ncwd = 'd'",
            "child.a.command: warning: cannot start './x': No such file",
        ),
        (
            "[child.a]\ncommand = ['true']\nenv = { PATH = '/nowhere' }",
            "child.a.command: warning: cannot start 'true': No such file",
        ),
        (
            "[toolexec]\n[sidecar.s]\nkind = 'go'\nstart = ['nowhere']",
            f"sidecar.s.start: warning: {NOWHERE}",
        ),
        (
            "[toolexec.notify]\ncommand = ['/nowhere/x']",
            "toolexec.notify.command: warning: cannot start '/nowhere/x': No such file",
        ),
        ("[child.a]\ncommand = ['true']", ""),
        ("[child.a]\ncommand = ['./there']\ncwd = 'd'", ""),
        ("[child.a]\ncommand = ['only-here']\nenv = { PATH = '/x:{d}' }", ""),
        ("[child.a]\ncommand = ['./x']", ""),  # where the daemon will be, nobody knows
        (
            "[toolexec]\n[sidecar.s]\nkind = 'go'\npath = ['{d}']\nstart = ['only-here']",
            "",
        ),
    ],
)
def test_a_program_that_is_not_there_is_told(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "d").mkdir()
    for name in ("there", "only-here"):
        (tmp_path / "d" / name).touch(mode=0o755)
    outcome = check(tmp_path, text.replace("{d}", f"{tmp_path}/d"))
    assert outcome.status == 0
    assert outcome.said(f"c.toml: {told}") if told else outcome.err == b""


# Credentials of the service manager are not there for an operator.
@pytest.mark.parametrize("key", ["", "models.m."])
def test_a_credential_of_the_unit_is_missed_inside_it_alone(
    tmp_path: Path, key: str
) -> None:
    model = "[llm.models.m]\nbase_url = 'http://localhost/v1'\n" if key else "[llm]\n"
    text = f"{model}api_key_file = '$CREDENTIALS_DIRECTORY/key'\n"
    outcome = check(tmp_path, text)
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    assert outcome.said(
        f"c.toml: llm.{key}api_key_file: warning: cannot use key file"
        " '$CREDENTIALS_DIRECTORY/key': systemd gave no credentials"
    )
    refused = sandhost("run", "--config", "c.toml", "--", "true", cwd=tmp_path)
    assert refused.status == 125
    assert refused.said("systemd gave no credentials")
    (tmp_path / "given").mkdir()
    inside = ENVIRONMENT | {"CREDENTIALS_DIRECTORY": str(tmp_path / "given")}
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, env=inside)
    assert outcome.status == 2
    assert outcome.said(f"llm.{key}api_key_file: cannot use key file")
    (tmp_path / "given" / "key").write_text("sk-of-the-unit\n")
    (tmp_path / "given" / "key").chmod(0o600)
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, env=inside)
    assert (outcome.status, outcome.err) == (0, b"")
