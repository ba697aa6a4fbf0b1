"""Our sandboxes behind Ray's interface, as far as no cluster is needed."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.experimental import sandbox as rays
from ray.experimental.sandbox.config import SandboxConfig
from ray.experimental.sandbox.http.host import SandboxHost

import sandhost.ray as ours
from supervisor.cluster import ray_sandbox
from tests.helpers.daemon import daemon
from tests.helpers.fleetdoors import Doors, fleet_of

pytestmark = pytest.mark.slow


def shape(function: Any) -> list[tuple[str, object]]:
    """Return the parameters of a function and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return [
        (one.name, one.default)
        for one in parameters
        if not one.name.startswith("_ray_")  # Ray's own, of an actor's method
    ]


def methods(kind: type) -> dict[str, list[tuple[str, object]]]:
    """Return the public methods of a class and their parameters."""
    return {
        name: shape(value)
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


# spec FL3
def test_create_and_its_actor_have_the_signatures_of_rays() -> None:
    assert shape(ours.create) == shape(rays.create)
    rays_actor = rays.Sandbox.__ray_metadata__.modified_class
    theirs, found = methods(rays_actor), methods(ours.Sandbox)
    assert {name: found.get(name) for name in theirs} == theirs
    theirs, found = methods(rays.BaseSandboxBackend), methods(ours.SandhostBackend)
    assert {name: found.get(name) for name in theirs} == theirs


# spec FL3
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "python:3.11-slim"}, "the image 'python:3.11-slim': no registry"),
        ({"image": "library/python"}, "the image 'library/python': no registry"),
        ({"network": "public"}, "network='public'"),
        ({"network": "host"}, "network='host'"),
        ({"network": "host", "dns": ["10.0.0.1"]}, "network='host'"),
        ({"rootless": False}, "rootless=False"),
        ({"readonly": False}, "readonly=False"),
        ({"capabilities": ["CAP_CHOWN"]}, "CAP_CHOWN"),
        ({"capabilities": rays.DOCKER_DEFAULT_CAPABILITIES}, "CAP_CHOWN"),
        ({"workdir": "/elsewhere"}, "workdir='/elsewhere'"),
        ({"workdir": "/srv/repository"}, "workdir='/srv/repository'"),
        ({"snapshot": "x"}, "'snapshot'"),
        ({"_ignore_cgroups": True}, "'_ignore_cgroups'"),
    ],
)
def test_create_refuses_by_name_what_is_not_to_be_had(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(rays.SandboxCreationError) as why:
        ours.create(**{"image": "/srv/repo", **options})
    assert said in str(why.value)


# spec FL3
def test_processors_that_the_cluster_does_not_offer_are_refused() -> None:
    ray_sandbox.check_cpu(2.0, {"CPU": 2.0})
    with pytest.raises(rays.SandboxCreationError, match="cpu=1: the cluster offers no"):
        ray_sandbox.check_cpu(1.0, {"sandhost": 8.0})


# spec FL3
def test_a_runtime_refuses_an_option_that_it_does_not_know() -> None:
    runtime = ours.SandhostRuntime("/nowhere/control")
    for name, value in (("_ignore_cgroups", True), ("snapshot", "x")):
        with pytest.raises(rays.SandboxCreationError, match=name):
            runtime.create("/srv/repo", **{name: value})


# spec FL3
async def test_a_backend_has_children_of_the_fleet(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "a.txt").write_text("hello\n")
    with daemon(tmp_path, "[fleet]\n", grace="1s") as one:
        async with fleet_of(tmp_path / "head", a=one) as scene:
            backend = ours.SandhostBackend(scene.control("a"))
            config = SandboxConfig(
                image=str(base), memory="512Mi", env={"COLOUR": "red"}, shell="/bin/sh"
            )
            key = await scene.call(backend.create_sandbox, config)
            await scene.call(check_backend, backend, key)
            assert backend.config_of(key) is config
            await scene.call(backend.delete_sandbox, key)
            assert (
                await scene.call(backend.get_status, key)
                is rays.SandboxStatus.TERMINATED
            )
            with pytest.raises(rays.SandboxNotFoundError):
                await scene.call(backend.exec_command, key, "true")
            assert await scene.call(one.client.workspaces) == []
            assert await scene.call(one.client.ps) == []
            await check_host(scene, str(base))
            assert await scene.call(one.client.workspaces) == []
    assert [path.name for path in base.iterdir()] == ["a.txt"]


def check_backend(backend: ours.SandhostBackend, key: str) -> None:
    """Use each method of a backend on a sandbox that runs."""
    assert backend.get_status(key) is rays.SandboxStatus.RUNNING
    done = backend.exec_command(key, "echo $COLOUR; echo e >&2; exit 7")
    assert (done.exit_code, done.stdout, done.stderr) == (7, "red\n", "e\n")
    done = backend.exec_command(key, ["/no/such"])
    assert (done.exit_code, "/no/such" in done.stderr) == (127, True)
    assert backend.exec_command(key, ["./a.txt"]).exit_code == 126
    done = backend.exec_command(key, "pwd; echo $X", cwd="/usr", env={"X": "y"})
    assert done.stdout == "/usr\ny\n"
    assert (
        backend.exec_command(key, "echo $0", shell="/bin/bash").stdout == "/bin/bash\n"
    )
    with pytest.raises(rays.SandboxTimeoutError):
        backend.exec_command(key, "sleep 600", timeout=0.2)
    with pytest.raises(rays.SandboxExecError, match="user='root'"):
        backend.exec_command(key, "true", user="root")
    no_text: Any = {"N": 4}
    for words, env in (([], None), (["true"], no_text)):
        with pytest.raises(rays.SandboxExecError, match="cannot run "):
            backend.exec_command(key, words, env=env)
    backend.write_file(key, "sub/b.txt", "one\n")
    backend.write_file(key, "sub/b.txt", b"two\n", append=True)
    assert backend.read_file(key, "sub/b.txt") == b"one\ntwo\n"
    with pytest.raises(rays.SandboxError, match=r"none\.txt"):
        backend.read_file(key, "none.txt")
    with pytest.raises(rays.SandboxError, match=r"/usr/b\.txt"):
        backend.write_file(key, "/usr/b.txt", "")


async def check_host(scene: Doors, image: str) -> None:
    """Have Ray's own `SandboxHost` boot our runtime, and use it."""

    async def use() -> dict[str, Any]:
        host = SandboxHost(
            "box",
            {"image": image, "shell": "/bin/sh"},
            {},
            runtime_factory=lambda: ours.SandhostRuntime(scene.control("a")),
        )
        await host.boot()
        told = await host.describe()
        assert (told["status"], told["error"]) == ("running", None)
        begun = await host.start_exec("cat a.txt")
        done = await host.get_exec(begun["exec_id"], wait_seconds=60)
        await host.terminate()
        return dict(done)

    done = await scene.call(lambda: asyncio.run(use()))
    assert (done["status"], done["exit_code"], done["stdout"]) == (
        "completed",
        0,
        "hello\n",
    )
