"""The fresh root of a child, made by root while the child changes it.

Each case is a program in a mount namespace of its own: nothing of this machine changes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.sandbox.scratch import remove_tree
from tests.helpers.spawning import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.attack,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without a user"),
]

PROGRAM = """
import os, sys
sys.path.insert(0, {source!r})
from hostlib.linux import mount_calls, syscalls
from supervisor.spawn.launchpad.layers import common_root, fresh_root, mounts
from supervisor.spawn.launchpad.layers import namespaces
root, outside = {root!r}, {outside!r}
os.chdir(root)
fill = mounts._fill
def filled(*args):
    os.chdir(root)
    swap()
    fill(*args)
def swap():
    pass
mounts._fill = filled
def known(path, kind):
    if kind != "hide":
        return False
    found = os.stat(path)
    return found.st_dev, found.st_ino
def nothing(*_):
    raise OSError(38, "filtered")
def build(*trees, links=()):
    namespaces.enter("mountns")
    trees = tuple((os.fsencode(path), kind, known(path, kind)) for path, kind in trees)
    links = tuple((os.fsencode(a), os.fsencode(b)) for a, b in links)
    passed = mounts.PassedDescriptors((), -1, -1)
    mounts.build(mounts.RootEntries(links, ()), trees, -1, passed, fresh_proc=False)
"""


@pytest.fixture(params=["openat2", "without openat2"])
def way(request: pytest.FixtureRequest) -> str:
    """How names are opened: by the kernel, or step by step where it cannot."""
    return "" if request.param == "openat2" else "syscalls._openat2 = nothing\n"


def says(tmp_path: Path, program: str) -> str:
    """Run a program in a directory `root`, beside a directory `outside`."""
    root, outside = str(tmp_path / "root"), str(tmp_path / "outside")
    head = PROGRAM.format(source=str(ROOT), root=root, outside=outside)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", head + program],
        capture_output=True,
        check=False,
    )
    assert not done.stderr, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Return a directory with the two: one is shared with a child, one is not."""
    for name in ("root/q", "root/own", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root" / "q" / "tool").write_text("mine")
    (tmp_path / "outside" / "secret").write_text("s3cret")
    return tmp_path


# attack 4: each name in what is mounted already is the child's to change
@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("to", ["outside", "/proc/1/root", "../outside"])
def test_nothing_is_made_through_what_is_mounted(
    places: Path, way: str, kind: str, to: str
) -> None:
    name = {"file": "q/tool", "directory": "q/made"}[kind]
    if kind == "directory":
        (places / "root" / "q" / "made").mkdir()
    target = {"outside": "outside", "/proc/1/root": "'/proc/1/root' + outside"}
    said = says(
        places,
        f"""{way}
def swap():
    os.rename("q", "before")
    os.symlink({target.get(to, repr(to))}, "q")
build((root, "write"), (root + "/{name}", "execute"))
print(sorted(os.listdir(root)))
""",
    )
    assert said == "['before', 'own', 'q']\n"
    assert os.listdir(places / "outside") == ["secret"]


def test_what_is_mounted_in_something_mounted_is_the_very_same(
    places: Path, way: str
) -> None:
    said = says(
        places,
        f"""{way}
def swap():
    os.rename("own", "before"); os.mkdir("own")
os.mkdir("other")
build((root, "read"), (root + "/own", "write"), (root + "/other", "write"))
for name in ("own", "other"):
    try:
        os.mkdir(f"{{root}}/{{name}}/new")
    except OSError as why:
        print(name, why.errno)
    else:
        print(name, "written")
""",
    )
    assert said == "own 30\nother written\n"
    assert os.listdir(places / "root" / "own") == []


# A stick with devices and set-user-ID files may be mounted in what a child sees.
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("execute", "nodev nosuid ro"),
        ("read", "nodev noexec nosuid ro"),
        ("write", "nodev nosuid rw"),
        ("device", "nosuid ro"),
    ],
)
def test_what_is_mounted_beneath_a_copy_is_no_freer_than_the_copy(
    places: Path, kind: str, expected: str
) -> None:
    said = says(
        places,
        f"""
namespaces.enter("mountns")
mount_calls.mount(b"none", b"/", b"", mount_calls.MS_REC_PRIVATE, b"")
for place in (root, root + "/own"):
    mount_calls.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, b"")
    os.makedirs(root + "/own", exist_ok=True)
build((root, {kind!r}))
for line in open("/proc/self/mountinfo"):
    _, _, _, _, path, flags, *_ = line.split()
    if path.startswith(root):
        print(path[len(root):] or "/", *sorted(flags.split(",")))
""",
    )
    lines = [line.replace(" relatime", "") for line in said.splitlines()]
    assert lines == [f"/ {expected}", f"/own {expected}"]


# attack 3: a rule's path was looked at before; a link there now is somebody's doing
@pytest.mark.parametrize("name", ["link", "link/secret", "way/secret"])
def test_a_rule_whose_path_is_a_link_brings_nothing(
    places: Path, way: str, name: str
) -> None:
    said = says(
        places,
        f"""{way}
os.symlink(outside, "link")
os.symlink("../outside", "way")
build((root + "/{name}", "read"))
print(os.path.exists("{name}"), os.path.exists(root + "/{name}"))
""",
    )
    assert said == "False False\n"


def test_a_link_in_the_fresh_root_is_not_made_through_another(
    places: Path, way: str
) -> None:
    said = says(
        places,
        f"""{way}
links = ((root + "/a", outside), (root + "/a/b", "x"), ("/dev/shm", "/run/shm"))
build((root + "/a/c", "read"), links=links)
print(os.readlink(root + "/a") == outside, os.path.islink("/dev/shm"))
""",
    )
    assert said == "True False\n"
    assert os.listdir(places / "outside") == ["secret"]


def test_a_directory_may_lie_deep(places: Path, way: str) -> None:
    try:
        said = says(
            places,
            f"""{way}
deep = "/a" * 1300
for _ in range(1300):
    os.mkdir("a"); os.chdir("a")
os.chdir(root)
build((root + deep, "read"))
print(os.path.isdir(root + deep), os.listdir(root))
""",
        )
    finally:
        # Deeper than what removes others goes.
        assert remove_tree(places / "root") is None
    assert said == "True ['a']\n"


HIDDEN = """
os.mkdir("own/tmp"); open("own/secret", "w").close(); open("own/tool", "w").close()
trees = [(root, "write"), (root + "/own", "hide")]
trees += [(root + "/own/tmp", "write"), (root + "/own/tool", "read")]
"""


def test_what_is_hidden_has_places_for_what_is_seen_and_nothing_else(
    places: Path, way: str
) -> None:
    said = says(
        places,
        f"""{way}{HIDDEN}
build(*trees, links=((root + "/own/link", "/gone"), (root + "/other", "/gone")))
print(sorted(os.listdir(root)), sorted(os.listdir(root + "/own")))
open(root + "/own/tmp/made", "w").close()
for name in ("own/made", "own/tool", "made"):
    try:
        open(f"{{root}}/{{name}}", "w").close()
    except OSError as why:
        print(name, why.errno)
try:
    os.rename(root + "/own", root + "/away")
except OSError as why:
    print(why.errno)
""",
    )
    assert said == (
        "['own', 'q'] ['link', 'tmp', 'tool']\nown/made 30\nown/tool 30\n16\n"
    )
    assert (places / "root" / "own" / "tmp" / "made").exists()
    assert (places / "root" / "made").exists()


# attack 4: it is moved after the host has looked, or after it is held; or before a name
# of it is looked up.
@pytest.mark.parametrize("when", ["seen", "held"])
@pytest.mark.parametrize("instead", ["nothing", "directory", "link", "link back"])
def test_what_is_to_be_hidden_and_is_moved_ends_the_start(
    places: Path, way: str, when: str, instead: str
) -> None:
    said = says(
        places,
        f"""{way}{HIDDEN}
def move():
    os.rename("own", "away")
    if {instead!r} == "directory":
        os.mkdir("own")
    elif {instead!r} == "link":
        os.symlink(outside, "own")
    elif {instead!r} == "link back":
        os.symlink("away", "own")
if {when!r} == "held":
    swap = move
else:
    hold = mounts._hold_hidden
    def held(*args):
        os.chdir(root)
        move()
        return hold(*args)
    mounts._hold_hidden = held
try:
    build(*trees)
except mounts.PartError as why:
    print(*why.args)
""",
    )
    own = os.fsencode(places / "root" / "own")
    assert said == f"mountns 116 {own!r}\n"
    assert os.listdir(places / "outside") == ["secret"]


# attack 4: from then on it is covered, wherever it goes, and ours is not left by a name.
def test_what_is_hidden_stays_so_where_it_goes(places: Path, way: str) -> None:
    said = says(
        places,
        f"""{way}
os.makedirs("q/own/tmp"); open("q/own/secret", "w").close()
hide = fresh_root.Stage.hide
def hidden(stage, tree):
    hide(stage, tree)
    os.chdir(root)
    os.rename("q", "away")
    os.symlink(outside, "q")
fresh_root.Stage.hide = hidden
build((root, "write"), (root + "/q/own", "hide"), (root + "/q/own/tmp", "write"))
print(sorted(os.listdir(root)), os.listdir(root + "/away/own"))
open(root + "/away/own/tmp/made", "w").close()
""",
    )
    assert said == "['away', 'own', 'q'] ['tmp']\n"
    assert (places / "root" / "away" / "own" / "tmp" / "made").exists()
    assert os.listdir(places / "outside") == ["secret"]


OVERLAY = """
from supervisor.spawn.launchpad.layers import overlay
for name in ("q/d", "own/upper", "own/work"):
    os.mkdir(name)
def overlaid(path, own):
    namespaces.enter("mountns")
    trees = ((os.fsencode(root), "write", False),
             (os.fsencode(root + path), "overlay", os.fsencode(root + own)))
    passed = mounts.PassedDescriptors((), -1, -1)
    mounts.build(mounts.RootEntries((), ()), trees, -1, passed, fresh_proc=False)
    os.chdir(root + path)
make_overlay = overlay.make_overlay
def without(*args, has_user_marks, is_volatile):
    return make_overlay(*args, is_volatile=is_volatile)
def by_name(layers, way, **options):
    if way != overlay.NAMED:
        raise OSError
    return make_overlay(layers, way, **options)
"""


# spec WS2, WS2a
@pytest.mark.parametrize("older", ["", "overlay.make_overlay = by_name\n"])
def test_an_overlay_has_the_marks_of_a_user(places: Path, way: str, older: str) -> None:
    said = says(
        places,
        f"""{way}{OVERLAY}{older}
overlaid("/q", "/own")
os.rmdir("d"); os.mkdir("d")
print(os.listdir("d"), os.path.ismount("."))
""",
    )
    assert said == "[] True\n"
    assert os.listdir(places / "root/q/d") == []
    assert os.getxattr(places / "root/own/upper/d", "user.overlay.opaque") == b"y"


# spec WS2: such a mount is made, and shows EIO later
def test_an_overlay_without_the_marks_of_a_user_ends_the_start(
    places: Path, way: str
) -> None:
    said = says(
        places,
        f"""{way}{OVERLAY}
overlay.make_overlay = without
try:
    overlaid("/q", "/own")
except mounts.PartError as why:
    print(*why.args)
""",
    )
    assert said == f"userxattr 95 {os.fsencode(places / 'root/q')!r}\n"


# spec WS2: what is not shown cannot be looked at
def test_an_overlay_whose_place_is_another_s_ends_the_start(
    places: Path, way: str
) -> None:
    said = says(
        places,
        f"""{way}{OVERLAY}
def swap():
    os.rename("q", "before")
    os.mkdir("q")
try:
    overlaid("/q", "/own")
except mounts.PartError as why:
    print(*why.args)
""",
    )
    assert said == f"workspace 116 {os.fsencode(places / 'root/q')!r}\n"


LANDLOCKED = """
privileges.forbid_new_privileges()
landlock.apply({rules!r}, no_tcp=False, ready={ready})
for path in ("root/q/tool", "outside/secret"):
    try:
        print(open({where!r} + "/" + path).read())
    except OSError as why:
        print(why.errno)
"""


@pytest.mark.parametrize("prepared", [False, True])
def test_a_rule_of_landlock_follows_no_link(
    places: Path, way: str, prepared: bool
) -> None:
    link = places / "root" / "link"
    link.symlink_to(places / "outside")
    rules = tuple((os.fsencode(p), "read") for p in (places / "root" / "q", link))
    ready = f"landlock.prepare({rules!r}, no_tcp=False)" if prepared else None
    said = says(
        places,
        "from supervisor.spawn.launchpad.layers import landlock, privileges\n"
        + way
        + "try:\n    landlock.version()\nexcept OSError:\n    raise SystemExit"
        + LANDLOCKED.format(rules=rules, ready=ready, where=str(places)),
    )
    if not said:
        pytest.skip("no Landlock here")
    assert said == "mine\n13\n"


# ---------------------------------------------------------------- made beforehand

BEFOREHAND = """
def build_later(tree, *, files=(), links=(), meanwhile=lambda: None):
    namespaces.enter("mountns")
    trees = ((os.fsencode(tree), "execute", False),)
    common = common_root.make_common_root(trees, ())
    meanwhile()
    passed = mounts.PassedDescriptors((), -1, -1)
    made = mounts.RootEntries(links, files)
    mounts.build(made, trees, -1, passed, common, fresh_proc=False)
"""


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("q/tool", "files"),
        ("q/more", "files"),
        ("q/tool", "links"),
        ("q/more", "links"),
        ("q", "links"),
    ],
)
def test_own_entries_in_what_is_mounted_beforehand_are_covered_by_it(
    places: Path, name: str, own: str
) -> None:
    said = says(
        places,
        f"""{BEFOREHAND}
build_later(root, {own}=((os.fsencode(root + "/{name}"), b"own"),))
print(os.listdir(root + "/q"), open(root + "/q/tool").read())
""",
    )
    assert said == "['tool'] mine\n"


def test_what_became_a_link_is_not_seen_though_it_leads_to_the_same(
    places: Path, way: str
) -> None:
    said = says(
        places,
        f"""{way}{BEFOREHAND}
def swap_later():
    os.rename(root + "/q", root + "/before")
    os.symlink("before", root + "/q")
build_later(root + "/q", meanwhile=swap_later)
print(os.path.lexists(root + "/q"))
""",
    )
    assert said == "False\n"
