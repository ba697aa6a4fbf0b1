"""Mounts in the root, and names swapped by a child while they are resolved.

The rules are proved where paths are resolved (`tests/vfs`); here a child in each kind of
walls tries through its door, for the host resolves for it whatever its walls are.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, sandhost
from tests.helpers.stage import Stage
from tests.helpers.swapping import can_exchange, swapped
from tests.system.attacks.conftest import words_of

pytestmark = [pytest.mark.slow, pytest.mark.attack]


OPENS = int(os.environ.get("SWAPPER_OPENS", "1000"))

MOUNTS = 'mount --bind "$0/outside" "$0/root/dir" && mount -t proc proc "$0/root/proc"'
MOUNTED = ("sh", "-c", f'{MOUNTS} && exec "$@"')

SCRIPT = """
for name in dir/secret dir/../file dir/../../outside/secret dir/../../beside \
  proc/self/root/etc/passwd proc/self/cwd/beside proc/self/fd/0 proc/1/root/etc/passwd
do sandhost fs cat "$name" 2>&1; done
"""


# Nothing is mounted on this machine. A user that is not root has the rights to in a user namespace
# of its own, and to mount a proc where there is a pid namespace as well.
OF_ROOT = ("unshare", "-m")
OF_OTHERS = ("unshare", "-Urmpf", "--mount-proc")


@pytest.fixture(scope="module")
def own_mounts() -> tuple[str, ...]:
    """The prefix for a command in its own mount namespace, with rights to mount."""
    words = OF_ROOT if os.geteuid() == 0 else OF_OTHERS
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is missing")
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    if said := tried.stderr.decode().strip():
        pytest.skip(said)
    return words


# attack 10: what is mounted in the root belongs to it; it leads nowhere else.
def test_a_mount_in_the_root_is_no_way_out(
    tmp_path: Path, own_mounts: tuple[str, ...], kind: str
) -> None:
    for name in ("root/dir", "root/proc", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root" / "file").write_text("of the root\n")
    (tmp_path / "outside" / "secret").write_text("mounted\n")
    (tmp_path / "beside").write_text("secret\n")
    has_users = own_mounts == OF_ROOT
    options, wrapper = words_of(kind, tmp_path, has_users=has_users)
    outcome = sandhost(
        "run", *options, "--root", tmp_path / "root",
        "--", *wrapper, "sh", "-c", SCRIPT,
        wrapper=(*own_mounts, *MOUNTED, str(tmp_path)), cwd="/", env=ENVIRONMENT,
    )  # fmt: skip
    said = outcome.out.decode().splitlines()
    assert said[:2] == ["mounted", "of the root"]
    assert len(said) == 8, outcome
    assert [line for line in said[2:] if "denied" not in line] == []


# As systemd arranges a machine: what is mounted in a copy of a shared mount is mounted in
# the one that was copied, and in every other copy.
LOOK = """
grep -q " shared:" /proc/self/mountinfo || exit 9
"$@"; status=$?; cat /proc/self/mountinfo >&2; exit $status
"""
SHARED = ("--propagation", "shared", "sh", "-c", LOOK, "sh")


# attack 10: the mounts of a child are its own, and so are those of the host.
def test_what_is_mounted_for_a_child_is_mounted_for_nobody_else(
    tmp_path: Path, own_mounts: tuple[str, ...]
) -> None:
    tmp_path.chmod(0o755)
    where = tmp_path.with_name(f"{tmp_path.name}-beside")
    where.mkdir()
    options, _ = words_of("auto", where, has_users=own_mounts == OF_ROOT)
    outcome = sandhost(
        "run", *options, "--", "cat", "/proc/self/mountinfo",
        wrapper=(*own_mounts, *SHARED), cwd=tmp_path,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert outcome.status == 0, outcome
    if str(tmp_path).encode() not in outcome.out:
        pytest.skip("no mount namespace for children here")
    assert b" shared:" not in outcome.out
    assert b" master:" not in outcome.out
    assert str(tmp_path).encode() not in outcome.err
    assert os.listdir(tmp_path) == []


REUSED = """
mount -t tmpfs none "$0/m" && echo before >"$0/m/file" && stat -c %d "$0/m"
sandhost fs cat "$0/m/file"
umount "$0/m" && mount -t proc none "$0/m" && stat -c %d "$0/m"
sandhost fs cat "$0/m/self/environ" 2>&1
"""


# attack 24: a number that was a tmpfs's is a proc's by now
@pytest.mark.parametrize("view", ["--top-level", "--read"])
def test_what_is_mounted_in_anothers_place_is_known_for_what_it_is(
    tmp_path: Path, own_mounts: tuple[str, ...], view: str
) -> None:
    (tmp_path / "m").mkdir()
    words = (view,) if view == "--top-level" else (view, tmp_path)
    outcome = sandhost(
        "run", "--sandbox", "none", *words, "--", "sh", "-c", REUSED, str(tmp_path),
        wrapper=own_mounts, cwd="/", env={**ENVIRONMENT, "CANARY": "s3cret"},
    )  # fmt: skip
    first, text, second, said = outcome.out.splitlines()
    assert text == b"before", outcome
    assert b"s3cret" not in said
    assert b"denied" in said
    if first != second:
        pytest.skip("this kernel gave another number")


# attack 4, spec A4: 0 escapes, whatever the child's own walls are.
@pytest.mark.timeout(300)
async def test_a_child_never_reads_what_a_link_led_out_to(stage: Stage) -> None:
    outside = stage.where / "outside"
    for where, text in ((outside, "outside"), (stage.root / "dir", "root")):
        where.mkdir()
        (where / "file").write_text(text)
    (stage.root / "link").symlink_to("../outside")
    if why := can_exchange(stage.root / "dir", stage.root / "link"):
        pytest.skip(why)
    child = await stage.puppet()
    tried = (
        "{(lambda n: n if isinstance(n, bytes) else"
        " (read(n, 99), ask(b'CLOSE %d\\n' % n))[0])"
        f"(opened(b'dir/file')) for _ in range({OPENS})}}"
    )
    made = (
        "{ask(b'OPEN dir/new w false\\n')[:2], ask(b'REMOVE false dir/new\\n')[:2],"
        " ask(b'MKDIR false dir/made\\n')[:2]}"
    )
    with swapped(stage.root / "dir", stage.root / "link"):
        found = await child.do(tried)
        for _ in range(50):
            await child.do(made)
    assert found == {b"root", b"ERROR VFS access denied: 'dir/file'"}
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").read_text() == "outside"
