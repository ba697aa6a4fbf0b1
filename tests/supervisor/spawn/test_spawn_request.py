"""Requests refused before a start, and the search for a program."""

import errno
import os
from pathlib import Path

import pytest

from hostlib.linux.epoll import NO_WATCH
from supervisor.spawn.request import SpawnError, SpawnRequest, find_executable


def fault(**changes: object) -> str:
    """The text with which a request is refused."""
    fields: dict[str, object] = {
        "executable": "/bin/true",
        "argv": ("true",),
        "env": {},
        "cwd_fd": 0,
        "fds": (),
    }
    with pytest.raises(SpawnError) as caught:
        SpawnRequest(**(fields | changes)).body()  # type: ignore[arg-type]
    assert caught.value.stage == "request"
    assert caught.value.exit_status == 125
    return caught.value.text


# attack 12
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"argv": ("true", "a\0b")}, "argument 1 holds a NUL byte"),
        ({"argv": ()}, "argument list is empty"),
        ({"env": {"A\0": ""}}, "'A?' holds a NUL byte"),
        ({"env": {"A": "\0"}}, "'A' holds a NUL byte"),
        ({"env": {"A=B": ""}}, "'A=B' has no possible name"),
        ({"env": {"": ""}}, "'' has no possible name"),
        ({"argv": ("true", "\ud800")}, "stands for no bytes"),
        ({"executable": "true"}, "not absolute"),
        ({"executable": "/bin/\0"}, "path holds a NUL byte"),
        ({"fds": ((0, 3), (1, 3))}, "not distinct"),
        ({"fds": ((0, -1),)}, "not distinct"),
        ({"fds": tuple((0, n) for n in range(300))}, "more than"),
    ],
)
def test_what_no_process_can_be_is_refused(
    changes: dict[str, object], why: str
) -> None:
    text = fault(**changes)
    assert why in text
    assert text.isprintable()


# attacks 12, 13
def test_a_name_with_control_bytes_makes_one_line() -> None:
    assert fault(executable="bin/\n\x1b[2J\udcff").count("?") == 3


def program(directory: Path, name: str, mode: int = 0o755) -> Path:
    """An executable file."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return path


def lookup(name: str, path: str | None, cwd: Path) -> tuple[int, int]:
    """Errno and exit status with which a lookup fails."""
    with pytest.raises(SpawnError) as caught:
        find_executable(name, path, str(cwd))
    assert caught.value.stage == "lookup"
    return caught.value.errno, caught.value.exit_status


def test_a_name_is_found_in_the_first_directory_that_has_it(tmp_path: Path) -> None:
    program(tmp_path / "b", "tool")
    program(tmp_path / "c", "tool")
    path = f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/c"
    assert find_executable("tool", path, "/") == f"{tmp_path}/b/tool"


def test_a_file_that_is_not_executable_hides_none_behind_it(tmp_path: Path) -> None:
    program(tmp_path / "a", "tool", 0o644)
    (tmp_path / "b" / "tool").mkdir(parents=True)
    program(tmp_path / "c", "tool")
    path = f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/c"
    assert find_executable("tool", path, "/") == f"{tmp_path}/c/tool"


@pytest.mark.parametrize("path", ["", ":/nowhere", "/nowhere:", "."])
def test_an_empty_entry_is_the_working_directory(tmp_path: Path, path: str) -> None:
    program(tmp_path, "tool")
    assert Path(find_executable("tool", path, str(tmp_path))) == tmp_path / "tool"


def test_a_name_with_a_slash_is_a_path_from_the_working_directory(
    tmp_path: Path,
) -> None:
    found = program(tmp_path / "bin", "tool")
    assert find_executable("bin/tool", "/bin", str(tmp_path)) == str(found)
    assert find_executable(str(found), None, "/") == str(found)


def test_a_parent_of_a_symbolic_link_is_where_the_link_leads(tmp_path: Path) -> None:
    found = program(tmp_path / "far", "tool")
    (tmp_path / "far" / "deep").mkdir()
    (tmp_path / "link").symlink_to("far/deep")
    answer = find_executable("link/../tool", None, str(tmp_path))
    assert os.stat(answer).st_ino == found.stat().st_ino


def test_without_path_the_systems_programs_are_found() -> None:
    assert find_executable("sh", None, "/") == "/bin/sh"


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert lookup("tool", f"{tmp_path}:/bin", tmp_path) == (errno.ENOENT, 127)
    assert lookup("./tool", "/bin", tmp_path) == (errno.ENOENT, 127)
    assert lookup("", "/bin", tmp_path) == (errno.ENOENT, 127)
    assert lookup("a\0b", "/bin", tmp_path) == (errno.ENOENT, 127)
    program(tmp_path, "file")
    assert lookup("file/tool", "/bin", tmp_path) == (errno.ENOTDIR, 127)


def test_what_is_there_but_no_program_is_not_executable(tmp_path: Path) -> None:
    program(tmp_path, "text", 0o644)
    assert lookup("./text", None, tmp_path) == (errno.EACCES, 126)
    assert lookup("text", f"/bin:{tmp_path}", tmp_path) == (errno.EACCES, 126)
    os.mkfifo(tmp_path / "fifo", 0o755)
    assert lookup("./fifo", None, tmp_path) == (errno.EACCES, 126)
    (tmp_path / "directory").mkdir()
    assert lookup("./directory", None, tmp_path) == (errno.EISDIR, 126)


# face.md: what, why and what to do; a step that is not named otherwise says where it was.
@pytest.mark.parametrize(
    ("number", "stage", "detail", "said"),
    [
        (
            errno.ESTALE,
            "mountns",
            b"/x",
            "/x, which is to be hidden from it, was moved",
        ),
        (errno.ESTALE, "netns", b"", "Stale file handle (at 'netns')"),
        (errno.ESTALE, "cwd", b"", "replaced by something else meanwhile; put the dir"),
        (errno.EACCES, "cwd", b"", "may not be entered; change to another one"),
        (errno.EACCES, "uid", b"/y", "/y: Permission denied (at 'uid')"),
        (errno.EPERM, "workspace", b"/w", "/w: Operation not permitted (at 'works"),
        (
            errno.ESTALE,
            "workspace",
            b"/w",
            "/w was replaced by something else meanwhile",
        ),
        (
            errno.EOPNOTSUPP,
            "userxattr",
            b"/w",
            "overlay of /w without 'userxattr'; use the mode 'direct', or a host",
        ),
        (errno.E2BIG, "landlock", b"", "--sandbox none (at 'landlock')"),
        (
            errno.EMFILE,
            "uid",
            b"",
            "raise the limit of open files (ulimit -n) (at 'uid')",
        ),
        (errno.ENFILE, "uid", b"", "(sysctl fs.file-max) (at 'uid')"),
        (errno.EAGAIN, "fork", b"", "end processes, or raise their number (ulimit -u"),
        (errno.ENOMEM, "fork", b"", "free memory, or raise what may be had (ulimit -v"),
        (errno.ETOOMANYREFS, "pidfd", b"", "descriptors in flight, or raise the limit"),
        (
            errno.ENOSPC,
            "fork",
            NO_WATCH.encode(),
            "or raise sysctl fs.epoll.max_user_w",
        ),
        (errno.ENOSPC, "mountns", b"", "max_mnt_namespaces allows, as many mounts as"),
        (
            errno.ENOSPC,
            "pidns",
            b"",
            "max_pid_namespaces allows, 32 lie in one another",
        ),
        (errno.ENOSPC, "utsns", b"", "max_uts_namespaces allows, or an outer sandbox"),
        (errno.ENOSPC, "cgroup", b"", "No space left on device (at 'cgroup')"),
    ],
)
def test_a_step_that_failed_is_told_with_what_to_do(
    number: int, stage: str, detail: bytes, said: str
) -> None:
    error = SpawnRequest("/bin/true", ("true",), {}, 0, ()).error(number, stage, detail)
    assert said in str(error)
    assert str(error).startswith("cannot start '/bin/true': ")
    assert (error.errno, error.stage) == (number, stage)
