"""The ways to a child's root and grants.

An operator's links are followed, a child's not.
"""

import errno
import os
from pathlib import Path

import pytest

from supervisor.sandbox.scratch import Scratch
from supervisor.spec import ChildSpec
from tests.helpers.command import sandhost
from vfs.places import close_places

pytestmark = pytest.mark.attack


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A child's root, a workspace of tools, and what is nobody's."""
    for name in ("root/in", "work/out", "secret", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "file").write_text("secret")
    return tmp_path


def reals(tree: Path, root: str = "root", **changes: tuple[str, ...]) -> list[str]:
    """Open the root and the grants of a child; return where they are."""
    grants = {
        key: tuple(f"{tree}/{name}" for name in names) for key, names in changes.items()
    }
    spec = ChildSpec(("true",), "/", f"{tree}/{root}", **grants)  # type: ignore[arg-type]
    places = spec.open_places([f"{tree}/work"])
    try:
        found = []
        for place in places:
            (fd,) = place.backend.descriptors()
            path = os.readlink(f"/proc/self/fd/{fd}")
            name = "" if place.only is None else f"/{os.fsdecode(place.only)}"
            found.append(os.path.relpath(path + name, tree))
        return found
    finally:
        close_places(places)


def replaced(place: Path, target: str) -> None:
    """Put a link where a directory was, as a tool can."""
    place.rename(place.with_name("moved"))
    place.symlink_to(target)


# attack 3: a tool's workspace, a grant to write, the root itself.
@pytest.mark.parametrize("target", ["../secret", "/", "moved"])
@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("work/out", {"read": ("work/out",)}),
        ("work/out", {"write": ("work/out/file",)}),
        ("work/out", {"write": ("work/out/to be made",)}),
        ("work/out", {"root": "work/out"}),
        ("elsewhere/in", {"write": ("elsewhere", "elsewhere/in")}),
        ("elsewhere/in", {"write": ("elsewhere/in", "elsewhere")}),
        ("root/in", {"read": ("root/in",)}),
    ],
)
def test_a_link_that_a_child_may_have_made_is_no_way(
    tree: Path, where: str, changes: dict[str, tuple[str, ...]], target: str
) -> None:
    (tree / "elsewhere" / "in").mkdir()
    assert reals(tree, **changes)  # type: ignore[arg-type]
    replaced(tree / where, target)
    with pytest.raises(OSError, match="may be a child's") as caught:
        reals(tree, **changes)  # type: ignore[arg-type]
    assert caught.value.errno == errno.ELOOP
    assert caught.value.filename.startswith(f"{tree}/{where}")


# attack 3: the last part is the link; what it names is not there yet.
def test_a_link_to_a_file_that_is_yet_to_be_made_is_no_way(tree: Path) -> None:
    (tree / "work" / "file").symlink_to("../secret/more")
    with pytest.raises(OSError, match="may be a child's"):
        reals(tree, write=("work/file",))


# attack 4: nobody has told this host that others may write where it makes directories.
def test_a_root_that_the_host_has_made_has_no_link_on_its_way(tree: Path) -> None:
    made = Scratch(None, where=str(tree))
    base = Path(made.root).parent
    spec = ChildSpec(("true",), "/", made.root, tmp_dir=made.tmp)
    close_places(spec.open_places())
    (tree / "secret" / "root").mkdir()
    base.rename(tree / "moved")
    base.symlink_to(tree / "secret")
    with pytest.raises(OSError, match="a link has come to stand") as caught:
        spec.open_places()
    assert caught.value.filename == made.root


def test_an_operators_links_are_followed(tree: Path) -> None:
    (tree / "link").symlink_to("work")
    (tree / "elsewhere" / "root").symlink_to("../root")
    (tree / "file").symlink_to("elsewhere/new")
    found = reals(tree, "elsewhere/root", read=("link/out",), write=("file",))
    assert found == ["root", "work/out", "elsewhere/new"]


def test_who_may_write_everything_has_nothing_to_gain(tree: Path) -> None:
    (tree / "link").symlink_to("secret")
    spec = ChildSpec(("true",), "/", f"{tree}/root", write=("/", f"{tree}/link"))
    close_places(spec.open_places())


@pytest.fixture
def left_link(tree: Path) -> Path:
    """Files that a tool of an earlier child left in a grant."""
    replaced(tree / "work" / "out", f"{tree}/secret")
    return tree


# attack 3
@pytest.mark.slow
def test_such_a_start_is_refused_and_says_why(left_link: Path) -> None:
    work = left_link / "work"
    outcome = sandhost(
        "run", "--write", work, "--read", work / "out",
        "--", "sandhost", "fs", "cat", work / "out" / "file",
    )  # fmt: skip
    assert outcome.status == 125
    assert outcome.said(f"cannot use '{work}/out': a link on its way may be a child's")


# attack 3: a sidecar's workspace in what a child may write.
@pytest.mark.slow
def test_a_workspace_is_not_reached_by_such_a_link_either(left_link: Path) -> None:
    config = left_link / "config"
    config.write_text(
        f"[policy.run]\nwrite = ['{left_link}/work']\n[toolexec]\n"
        f"[sidecar.c]\nkind = 'c-cpp'\nworkspace = '{left_link}/work/out'\n"
    )
    outcome = sandhost("run", "--config", config, "--", "true")
    assert outcome.status == 125
    assert outcome.said(f"'{left_link}/work/out': a link on its way may be a child's")
