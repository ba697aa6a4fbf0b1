"""Programs of a project: looked up beneath it, by a host that may be root."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.toolexec.project import find_own_program


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "project" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "private" / "there").write_text("#!/bin/sh\n")
    (tmp_path / "private" / "there").chmod(0o755)
    (tmp_path / "private" / "bin").mkdir()
    return tmp_path


@pytest.fixture
def cwd_fd(place: Path) -> Iterator[int]:
    fd = os.open(place / "project", os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_what_is_there_is_its_own(place: Path, cwd_fd: int) -> None:
    project = place / "project"
    bin_dir = project / ".venv" / "bin"
    assert find_own_program("python", cwd_fd) == (None, True)
    (bin_dir / "python3").write_text("#!/bin/sh\n")
    assert find_own_program("python3", cwd_fd) == (None, True), "not executable"
    (bin_dir / "python3").chmod(0o755)
    assert find_own_program("python3", cwd_fd) == (".venv/bin/python3", True)
    (bin_dir / "python").symlink_to("python3")
    assert find_own_program("python", cwd_fd) == (".venv/bin/python", True)
    (project / "node_modules" / "typescript").mkdir(parents=True)
    (project / "node_modules" / ".bin").mkdir()
    (project / "node_modules" / ".bin" / "tsc").symlink_to("../typescript/tsc")
    assert find_own_program("tsc", cwd_fd) == (None, False)
    (project / "node_modules" / "typescript" / "tsc").touch(0o755)
    assert find_own_program("tsc", cwd_fd) == ("node_modules/.bin/tsc", False)
    assert find_own_program("make", cwd_fd) == (None, False)


@pytest.mark.parametrize("kind", ["directory", "fifo", "loop", "file without x"])
def test_what_is_no_program_is_none(place: Path, cwd_fd: int, kind: str) -> None:
    # attack 8
    name = place / "project" / ".venv" / "bin" / "pip"
    if kind == "directory":
        name.mkdir()
    elif kind == "fifo":
        os.mkfifo(name, 0o755)
    elif kind == "loop":
        name.symlink_to("pip")
    else:
        name.touch(0o644)
    assert find_own_program("pip", cwd_fd) == (None, True)


# attack 24: what is there in a directory of the host's is not for the child to learn
@pytest.mark.parametrize("way", ["{}", "{}/private/../private/", "../../../{}"])
def test_nothing_outside_is_looked_at(place: Path, cwd_fd: int, way: str) -> None:
    bin_dir = place / "project" / ".venv" / "bin"
    private = str(place / "private") if way.startswith("{") else "private"
    if "/private/.." in way:
        private = str(place)
    found = []
    for name in ("there", "gone"):
        (bin_dir / "pip").unlink(missing_ok=True)
        (bin_dir / "pip").symlink_to(f"{way.format(private)}/{name}")
        found.append(find_own_program("pip", cwd_fd))
    assert found == [(".venv/bin/pip", True)] * 2
    found = []
    for name in ("private", "gone"):
        (place / "project" / ".venv").rename(place / "project" / f"before-{name}")
        (place / "project" / ".venv").symlink_to(place / name)
        found.append(find_own_program("pip", cwd_fd))
        (place / "project" / ".venv").unlink()
        (place / "project" / f"before-{name}").rename(place / "project" / ".venv")
    assert found == [(".venv/bin/pip", True)] * 2
