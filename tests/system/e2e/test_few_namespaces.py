"""Machines that give no namespaces of a kind, or no more.

Sysctls of namespaces(7).
"""

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost
from tests.helpers.rounds import LONG_ALONE
from tests.system.e2e.fewer import allowing
from tests.system.e2e.layers import as_root, layers, present

UNSHARE = shutil.which("unshare") or "false"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        subprocess.run(
            [*allowing("net=1"), UNSHARE, "--net", "true"],
            capture_output=True,
            check=False,
        ).returncode
        != 0,
        reason="nobody here may make a user namespace",
    ),
]

KINDS = {
    "mountns": "mnt",
    "pidns": "pid",
    "netns": "net",
    "ipcns": "ipc",
    "utsns": "uts",
}
NOBODY = 1000


def missing_in(journal: Path) -> dict[str, str]:
    """Return what the one child of a journal went without, and why."""
    lines = map(json.loads, journal.read_text().splitlines())
    (spawned,) = (line for line in lines if line["event"] == "child.spawned")
    found: dict[str, str] = spawned["isolation"]["missing"]
    return found


@cache
def present_of(uid: int) -> set[str]:
    """Return the layers that a user gets where no kind of namespace is refused."""
    return present(layers(allowing("", uid=uid)))


# security.md, layers: `auto` is what this machine gives, however it says that it gives none.
# A container's root enters no pid namespace from one that is not its own.
@pytest.mark.parametrize(
    ("layer", "uid"),
    [
        *((layer, NOBODY) for layer in KINDS),
        *(
            pytest.param(layer, 0, marks=LONG_ALONE)
            for layer in KINDS
            if layer != "pidns"
        ),
    ],
)
def test_a_child_does_without_what_nobody_is_given(
    tmp_path: Path, layer: str, uid: int
) -> None:
    journal, kind = tmp_path / "journal", KINDS[layer]
    wrapper = allowing(f"{kind}=0", uid=uid)
    words = ("--journal", journal, "--", "true")
    # The root of a user namespace has no users to give.
    options = as_root(tmp_path) if uid == 0 else ()
    outcome = sandhost("run", *options, *words, wrapper=wrapper, cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")
    said = f"sysctl user.max_{kind}_namespaces is 0"
    assert missing_in(journal)[layer] == said
    rows = layers(wrapper)
    assert rows[layer]["state"] == "missing"
    assert said in json.dumps(rows[layer])
    lost = {layer, "pidns"} if layer == "mountns" else {layer}
    assert present(rows) == present_of(uid) - lost


def test_who_is_given_no_user_namespaces_has_the_other_layers(tmp_path: Path) -> None:
    journal, wrapper = tmp_path / "journal", allowing("user=0", uid=NOBODY)
    for profile in ("auto", "required"):
        words = ("--sandbox", profile, "--journal", journal, "--", "true")
        outcome = sandhost("run", *words, wrapper=wrapper, cwd=tmp_path)
        assert (outcome.status, outcome.err) == (0, b"")
        missing = missing_in(journal)
        assert missing["userns"] == "sysctl user.max_user_namespaces is 0"
        assert missing["netns"] == "neither root nor a user namespace"
        journal.unlink()
    outcome = sandhost("doctor", wrapper=wrapper)
    text = " ".join(outcome.out.decode().split())
    assert (
        "user namespaces missing: sysctl user.max_user_namespaces is 0; raise it"
        in text
    )
    assert "seccomp present" in text


# spec WS4
def test_a_user_without_namespaces_is_told_which_modes_of_a_workspace_work(
    tmp_path: Path,
) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    (base / "a").write_text("old\n")
    wrapper = allowing("user=0", uid=NOBODY)
    script = "cat a; echo new >> a; ls .."

    def run(mode: str, *options: str | Path) -> Outcome:
        words = (*options, "--state-dir", tmp_path / "state", "--workspace")
        command = ("--", "sh", "-c", script)
        return sandhost("run", *words, f"{base}:{mode}", *command, wrapper=wrapper)

    refused = run("review")
    assert (refused.status, refused.out) == (125, b"")
    assert b"; use the mode 'direct' or 'read-only'" in refused.err
    read = run("read-only")
    assert (read.out, (base / "a").read_text()) == (b"old\n", "old\n")
    assert b"without its read-only mount: Landlock keeps content and names" in read.err
    written = run("direct")
    assert (written.out, (base / "a").read_text()) == (b"old\n", "old\nnew\n")
    assert b"cannot open directory '..'" in written.err  # nothing but the base
    # Without Landlock nothing would keep it from being written to.
    layers = ("--config", profile(tmp_path, "['seccomp', 'mountns']", "[]"))
    refused = run("read-only", *layers)
    assert (refused.status, refused.out) == (125, b"")
    assert b"no layer keeps it read-only" in refused.err
    assert b"; use the mode 'direct'" in refused.err
    assert run("direct", *layers).out.startswith(b"old\nnew\n")
    # A profile that names no such layer is refused with what to name.
    refused = run("direct", "--config", profile(tmp_path, "['landlock']", "[]"))
    assert b"has no layer 'mountns'; add it to its layers" in refused.err


def profile(where: Path, layers: str, required: str) -> Path:
    """Write a configuration with one profile, and a policy that names it."""
    file = where / "config.toml"
    file.write_text(
        f"[sandbox.x]\nlayers = {layers}\nrequired = {required}\n"
        "[policy.run]\nsandbox = 'x'\n"
    )
    return file


def test_what_nobody_is_given_cannot_be_required(tmp_path: Path) -> None:
    file = profile(tmp_path, "['seccomp', 'ipcns']", "['ipcns']")
    said = "sysctl user.max_ipc_namespaces is 0; it takes"
    for words in (("check-config", file), ("run", "--config", file, "--", "true")):
        outcome = sandhost(*words, wrapper=allowing("ipc=0"), cwd=tmp_path)
        assert outcome.status != 0
        assert said in outcome.err.decode() + outcome.out.decode()


# A child that uses them up must not weaken another's walls.
def test_namespaces_that_are_used_up_refuse_the_start(tmp_path: Path) -> None:
    wrapper = (*allowing("net=1"), UNSHARE, "--net")
    words = (*as_root(tmp_path), "--", "true")
    outcome = sandhost("run", *words, wrapper=wrapper, cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said(
        "as many net namespaces as sysctl user.max_net_namespaces allows"
    )
    assert outcome.said("name a profile without the layer 'netns' (at 'netns')")
    file = profile(tmp_path, "['landlock', 'seccomp']", "[]")
    words = ("--config", file, "--", "true")
    outcome = sandhost("run", *words, wrapper=wrapper, cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")


# face.md, [policy.NAME]: a network that is written is kept, or it is refused.
def test_a_network_that_only_root_could_keep_is_refused(tmp_path: Path) -> None:
    wrapper = allowing("", uid=NOBODY)
    file = profile(tmp_path, "['landlock', 'netns']", "[]")
    how = (
        "where the host is not root the layer netns takes userns; add that or seccomp to"
        " its layers, or set network = 'host'"
    )
    outcome = sandhost("run", "--config", file, "--", "true", wrapper=wrapper)
    assert outcome.status == 0
    assert f"sandbox 'x' keeps nobody from it: {how}" in outcome.err.decode()
    with file.open("a") as more:
        more.write("network = 'none'\n")
    outcome = sandhost("run", "--config", file, "--", "true", wrapper=wrapper)
    assert outcome.status == 125
    assert outcome.said(f"which keeps nobody from the network here: {how}")
    file.write_text(file.read_text().replace("'netns'", "'netns', 'userns'"))
    script = "cut -d: -f1 /proc/net/dev | grep -vc 'lo\\|Inter\\|face'"
    words = ("--config", file, "--", "sh", "-c", script)
    outcome = sandhost("run", *words, wrapper=wrapper)
    assert outcome.out == b"0\n"
    assert b"keeps nobody from it" not in outcome.err


# Nor where nobody is given one: by a host that is root, and by one that is not.
@pytest.mark.parametrize(
    ("sysctls", "uid", "name"),
    [("net=0", 0, "net"), ("net=0", NOBODY, "net"), ("user=0", NOBODY, "user")],
)
def test_a_network_that_nobody_is_given_is_refused(
    tmp_path: Path, sysctls: str, uid: int, name: str
) -> None:
    wrapper = allowing(sysctls, uid=uid)
    file = profile(tmp_path, "['landlock', 'netns', 'userns']", "[]")
    how = (
        f"sysctl user.max_{name}_namespaces is 0; raise it, or add seccomp to its layers,"
        " or set network = 'host'"
    )
    words = ("run", "--config", file, "--", "true")
    outcome = sandhost(*words, wrapper=wrapper)
    assert outcome.status == 0
    # Once, though each start finds it out.
    told = (
        f"its children have the host's network: sandbox 'x' keeps nobody from it: {how}"
    )
    lines = outcome.err.decode().splitlines()
    assert sum(told in line for line in lines) == 1
    expected = (told, "lacks seccomp", "Children of policy 'run' run")
    assert all(any(text in line for text in expected) for line in lines)
    with file.open("a") as more:
        more.write("network = 'none'\n")
    for refused in (words, ("check-config", file)):
        outcome = sandhost(*refused, wrapper=wrapper)
        assert outcome.status in {2, 125}
        assert (
            f"which keeps nobody from the network here: {how}"
            in (outcome.err + outcome.out).decode()
        )


# doctor says "raise it": a host that is there already heeds that.
def test_a_sysctl_that_was_raised_is_heeded(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    as_root(tmp_path)
    text = (tmp_path / "as-root.toml").read_text() + "[policy.p]\nsandbox = 'as-root'\n"
    config.write_text(f"{text}[host]\nruntime_dir = 'run'\nstate_dir = 'state'\n")
    script = f"""
set -e
{SANDHOST} serve --config c.toml 2>log & host=$!
trap 'kill $host; wait $host' EXIT
until {SANDHOST} ps --control run/control >/dev/null 2>&1; do sleep 0.05; done
export SANDHOST_CONTROL=run/control
layers() {{
  {SANDHOST} spawn --policy p -- sleep 1000 >/dev/null
  {SANDHOST} ps --json
}}
layers
echo 1000 >/proc/sys/user/max_ipc_namespaces
layers
"""
    wrapper = allowing("ipc=0")
    outcome = subprocess.run(
        [*wrapper, "/bin/sh", "-c", script],
        cwd=tmp_path, capture_output=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    first, both = json.loads(b"[" + outcome.stdout.replace(b"]\n[", b"],[") + b"]")
    assert "ipcns" in first[0]["isolation"]["missing"]
    assert [("ipcns" in row["isolation"]["layers"]) for row in both] == [False, True]


# spec NET9: rules cannot be kept, under `auto` as well, and no child starts without them.
@pytest.mark.parametrize("kind", ["user", "net"])
def test_rules_of_a_network_are_refused(tmp_path: Path, kind: str) -> None:
    words = ("--network", "a.example", "--", "touch", "done")
    wrapper = allowing(f"{kind}=0", uid=NOBODY)
    outcome = sandhost("run", *words, cwd=tmp_path, wrapper=wrapper)
    assert outcome.status == 125
    how = f"cannot keep the rules: sysctl user.max_{kind}_namespaces is 0"
    assert outcome.said(f"--network: {how}")
    assert not (tmp_path / "done").exists()
