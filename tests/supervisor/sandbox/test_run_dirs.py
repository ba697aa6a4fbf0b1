"""A child's directory for sockets is the made one, wherever its name leads."""

import os
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from supervisor.children.specs import ChildOptions, make_spec
from supervisor.llm import endpoint
from supervisor.sandbox.scratch import Scratch
from supervisor.spec import ChildSpec
from supervisor.toolexec.backends.local import state_of
from supervisor.toolexec.listeners import unix_listener, unix_listener_on

pytestmark = pytest.mark.attack


class Made:
    """A child's directories, their names lost to somebody else.

    Attributes:
        spec: of the child.
        real: its directory for sockets, where that is by now.
        theirs: the directory to which its name leads.
    """

    def __init__(self, where: Path, scratch: Scratch) -> None:
        self.spec = make_spec(ChildOptions(), ("true",), scratch, (0, 1, 2))
        base = Path(scratch.run).parent
        self.real = where / "moved" / "run"
        self.theirs = where / "theirs" / "run"
        self.theirs.mkdir(parents=True)
        self._base = base

    def lose(self, how: str) -> None:
        """Move them away, and put something else where they were."""
        self._base.rename(self.real.parent)
        if how == "a link":
            self._base.symlink_to(self.theirs.parent)
        else:
            self.theirs.parent.rename(self._base)
            self.theirs = self._base / "run"

    def has_socket(self, name: str) -> bool:
        """Tell whether a socket is in its own directory; in the other there is nothing."""
        assert os.listdir(self.theirs) == []
        path = self.real / name
        return path.exists() and stat.S_ISSOCK(path.stat().st_mode)


@pytest.fixture
def made() -> Iterator[Made]:
    """The directories of one child, still where they were made."""
    # Not `tmp_path`, which may be too long for the name of a socket.
    with tempfile.TemporaryDirectory(prefix="run-") as where:
        scratch = Scratch(None, where=where)
        yield Made(Path(where), scratch)
        for fd, _ in scratch.descriptors():
            os.close(fd)


@asynccontextmanager
async def tool_socket(spec: ChildSpec) -> AsyncIterator[None]:
    async with unix_listener(spec) as (path, _):
        assert path == f"{spec.run_dir}/toolexec.sock"
        yield


@asynccontextmanager
async def tool_socket_of_before(spec: ChildSpec) -> AsyncIterator[None]:
    fd = -1
    async with unix_listener(spec) as (path, listener):
        fd = os.dup(listener.socket.fileno())
        async with unix_listener_on(fd, path, spec):
            yield


@asynccontextmanager
async def model_socket(spec: ChildSpec) -> AsyncIterator[None]:
    listener = endpoint.open_unix_listener(spec)
    yield
    endpoint.unlink_socket(spec)
    listener.close()


Opened = Callable[[ChildSpec], AbstractAsyncContextManager[None]]

SOCKETS: list[tuple[Opened, str]] = [
    (tool_socket, "toolexec.sock"),
    (tool_socket_of_before, "toolexec.sock"),
    (model_socket, endpoint.SOCKET_NAME),
]


# attack 4: who may rename in what the host makes directories in.
@pytest.mark.parametrize("how", ["a link", "a directory"])
@pytest.mark.parametrize(("opened", "name"), SOCKETS)
async def test_a_socket_is_where_its_directory_is_now(
    made: Made, opened: Opened, name: str, how: str
) -> None:
    made.lose(how)
    async with opened(made.spec):
        assert made.has_socket(name)
    assert not made.has_socket(name)


# attack 4: the name goes while the host listens; nothing of that name is removed elsewhere.
@pytest.mark.parametrize("how", ["a link", "a directory"])
@pytest.mark.parametrize(("opened", "name"), SOCKETS)
async def test_a_socket_is_removed_from_where_it_was_made(
    made: Made, opened: Opened, name: str, how: str
) -> None:
    async with opened(made.spec):
        made.lose(how)
        assert made.has_socket(name)
        (made.theirs / name).touch()
    assert os.listdir(made.theirs) == [name]
    assert os.listdir(made.real) == []


# attack 4
@pytest.mark.parametrize("how", ["a link", "a directory"])
def test_what_tools_keep_is_where_its_directory_is_now(made: Made, how: str) -> None:
    made.lose(how)
    assert state_of(made.spec, "x") == f"{made.spec.run_dir}/sidecar-x"
    assert os.listdir(made.theirs) == []
    assert os.listdir(made.real) == ["sidecar-x"]


# attack 4: where nobody holds what it was made in, no link is followed at least.
def test_no_link_leads_to_a_directory_that_nobody_holds(made: Made) -> None:
    spec = ChildSpec(("true",), "/", "/", run_dir=made.spec.run_dir)
    with spec.run_dir_held() as fd:
        assert os.path.samestat(os.fstat(fd), os.stat(made.spec.run_dir or ""))
    made.lose("a link")
    with pytest.raises(OSError, match="symbolic links"), spec.run_dir_held():
        pass


# attack 4: a child without walls may write there itself.
def test_a_link_in_its_own_place_is_refused(made: Made) -> None:
    run_dir = Path(made.spec.run_dir or "")
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.symlink_to(made.theirs)
    with pytest.raises(OSError, match="symbolic links"), made.spec.run_dir_held():
        pass
