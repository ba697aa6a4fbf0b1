"""Our children behind the interface of `ray.experimental.sandbox`: `sandhost.ray`.

A sandbox is a child on this machine's node (`fleet_child`), its image a directory or a
workspace of that node. Rules of this file.

1. Whatever is asked for and is not to be had is refused by its name, never ignored.
2. The child ends with the process of the actor, however that ends, and its workspace
   with it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental.sandbox import (
    DOCKER_DEFAULT_CAPABILITIES,
    BaseSandboxBackend,
    ExecResult,
    SandboxCreationError,
    SandboxError,
    SandboxExecError,
    SandboxNotFoundError,
    SandboxRuntime,
    SandboxStatus,
    SandboxTimeoutError,
    parse_memory_bytes,
)
from ray.experimental.sandbox.config import SandboxConfig

from supervisor.cluster.client import FleetClient
from supervisor.cluster.commands import CommandTimeoutError, FleetChildError
from supervisor.cluster.fleet_child import FleetChild
from supervisor.cluster.fleet_child import create as create_child
from supervisor.control.client import ControlError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a command that cannot be started, as of a shell."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Form of a workspace's name; a registry's image has '/' or ':' in its name."""

_HOW_IMAGES = (
    "give the path of a directory, or the NAME of a [workspace.NAME] of this node"
)


class Images:
    """The images that a node has: directories, and workspaces of its configuration."""

    def pull_image(self, image: str, timeout_seconds: float = 120.0) -> str:
        """Return an image; there is nothing to pull.

        Raises:
            SandboxCreationError: it is a registry's name.
        """
        del timeout_seconds
        if not image.startswith("/") and _NAME.fullmatch(image) is None:
            raise SandboxCreationError(
                f"cannot use the image {image!r}: no registry is asked; {_HOW_IMAGES}"
            )
        return image


class SandhostBackend(BaseSandboxBackend):  # type: ignore[misc]  # Ray is untyped
    """Sandboxes that are children of the fleet, on this machine's node.

    Args:
        control: the control socket of this node's daemon; None for the usual one.
    """

    def __init__(self, control: str | None = None) -> None:
        super().__init__(Images())
        self._control = control
        self._sandboxes: dict[str, tuple[FleetChild, SandboxConfig]] = {}

    def create_sandbox(self, config: SandboxConfig) -> str:
        """Place a child, and return its name once it takes commands.

        Raises:
            SandboxCreationError: the fleet refuses, or something is asked for that is not
                to be had; the text names it.
        """
        check_config(config)
        workspace = self.image_manager.pull_image(config.image)
        try:
            child = create_child(
                workspace,
                node=FleetClient(self._control).ask("here")["node"],
                cwd=config.workdir,
                env=config.env,
                limits=_limits_of(config),
                keep=False,
                control=self._control,
            )
        except (ControlError, FleetChildError) as why:
            raise SandboxCreationError(str(why)) from None
        self._sandboxes[child.name] = (child, config)
        return child.name

    def delete_sandbox(self, sandbox_id: str) -> None:
        """End a child and all that is left of it."""
        child, _ = self._find(sandbox_id)
        try:
            child.stop()
        except ControlError as why:
            raise SandboxError(str(why)) from None
        del self._sandboxes[sandbox_id]

    def exec_command(  # noqa: PLR0913, PLR0917 - Ray's signature
        self,
        sandbox_id: str,
        command: str | list[str],
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        shell: str | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command, a text by a shell; see `BaseSandboxBackend`.

        Raises:
            SandboxNotFoundError: there is no such sandbox here.
            SandboxTimeoutError: the command was ended, for its time was up.
            SandboxExecError: the child has ended, a user is named, or the command is none.
        """
        child, config = self._find(sandbox_id)
        if user is not None:
            raise SandboxExecError(
                f"cannot use user={user!r}: a child has one user; leave it out"
            )
        words = command
        if isinstance(command, str):
            words = [shell or config.shell, "-c", command]
        try:
            done = child.exec(words, timeout_s=timeout, cwd=cwd, env=env)
        except (FileNotFoundError, PermissionError) as why:
            is_missing = isinstance(why, FileNotFoundError)
            code = NOT_FOUND if is_missing else NOT_EXECUTABLE
            return ExecResult(code, "", f"{why.filename}: {why.strerror}\n", 0.0)
        except CommandTimeoutError as why:
            raise SandboxTimeoutError(str(why)) from None
        except (
            FleetChildError,
            ControlError,
            OSError,
            TypeError,
            ValueError,
        ) as why:
            raise SandboxExecError(str(why)) from None
        out, err = (data.decode(errors="replace") for data in (done.out, done.err))
        return ExecResult(done.status, out, err, done.duration_s)

    def write_file(
        self, sandbox_id: str, path: str, content: str | bytes, append: bool = False
    ) -> None:
        """Write a file, and make the directories above it.

        Raises:
            SandboxNotFoundError: there is no such sandbox here.
            SandboxError: the child may not write it, or has ended.
        """
        child, _ = self._find(sandbox_id)
        data = content.encode() if isinstance(content, str) else content
        try:
            child.write(path, data, append=append, parents=True)
        except (OSError, FleetChildError, ControlError) as why:
            raise SandboxError(f"cannot write {path!r}: {why}") from None

    def read_file(self, sandbox_id: str, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            SandboxNotFoundError: there is no such sandbox here.
            SandboxError: the child may not read it, or has ended.
        """
        child, _ = self._find(sandbox_id)
        try:
            return child.read(path)
        except (OSError, FleetChildError, ControlError) as why:
            raise SandboxError(f"cannot read {path!r}: {why}") from None

    def get_status(self, sandbox_id: str) -> SandboxStatus:
        """Return whether a child runs."""
        if sandbox_id not in self._sandboxes:
            return SandboxStatus.TERMINATED
        child, _ = self._sandboxes[sandbox_id]
        try:
            state = child.state()
        except ControlError:
            return SandboxStatus.ERROR
        if state == "running":
            return SandboxStatus.RUNNING
        is_over = state in {"ended", "lost"}
        return SandboxStatus.TERMINATED if is_over else SandboxStatus.PENDING

    def config_of(self, sandbox_id: str) -> SandboxConfig:
        """Return what a sandbox was made with."""
        return self._find(sandbox_id)[1]

    def _find(self, sandbox_id: str) -> tuple[FleetChild, SandboxConfig]:
        try:
            return self._sandboxes[sandbox_id]
        except KeyError:
            raise SandboxNotFoundError(f"no sandbox {sandbox_id!r} here") from None


class SandhostRuntime(SandboxRuntime):  # type: ignore[misc]  # Ray is untyped
    """Ray's `SandboxRuntime` with our backend; its own has no way to name one.

    Ray's `SandboxHost` asks for Docker's capabilities where nothing is said of them: of
    its own, that is no wish of a caller's, and a child has none.

    Args:
        control: as of `SandhostBackend`.
    """

    def __init__(self, control: str | None = None) -> None:
        self._backend = SandhostBackend(control)
        self._image_manager = self._backend.image_manager
        self._ttl_timers: dict[str, Any] = {}

    def create(self, image: str, **options: Any) -> str:
        """Provision a sandbox and return its id; see `SandboxRuntime.create`."""
        if options.get("capabilities") == DOCKER_DEFAULT_CAPABILITIES:
            options["capabilities"] = None
        try:
            return str(super().create(image, **options))
        except TypeError as why:  # an option that Ray does not know, either
            raise SandboxCreationError(f"cannot make a sandbox: {why}") from None


class Sandbox:
    """An actor with the methods of Ray's `Sandbox`, made as `create` says."""

    def __init__(self, **options: Any) -> None:
        self.runtime = SandhostRuntime()
        self.instance_id = self.runtime.create(**options)

    def get_instance_id(self) -> str:
        """Return the sandbox's id: the child's name in the fleet."""
        return self.instance_id

    def get_config(self) -> SandboxConfig:
        """Return what it was made with."""
        return self.runtime.backend.config_of(self.instance_id)

    def exec(
        self,
        command: str | list[str],
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        shell: str | None = None,
    ) -> ExecResult:
        """Run a command in it."""
        return self.runtime.exec(
            self.instance_id, command, timeout=timeout, cwd=cwd, env=env, shell=shell
        )

    def upload_file(self, local_path: str, remote_path: str) -> None:
        """Copy a file of the actor's machine into it."""
        self.runtime.upload_file(self.instance_id, local_path, remote_path)

    def download_file(self, remote_path: str, local_path: str) -> None:
        """Copy a file of it to the actor's machine."""
        self.runtime.download_file(self.instance_id, remote_path, local_path)

    def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file in it."""
        self.runtime.write_file(self.instance_id, path, content)

    def read_file(self, path: str) -> bytes:
        """Return the content of a file in it."""
        return bytes(self.runtime.read_file(self.instance_id, path))

    def get_status(self) -> SandboxStatus:
        """Return whether it runs."""
        return self.runtime.get_status(self.instance_id)

    def delete(self) -> None:
        """End it; a second call does nothing."""
        with suppress(SandboxNotFoundError):
            self.runtime.delete(self.instance_id)

    def terminate(self) -> None:
        """End it; a second call does nothing."""
        self.delete()


def create(  # noqa: PLR0913, PLR0917 - Ray's signature
    image: str,
    cpu: float | None = None,
    memory: str | float | None = None,
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    ttl_seconds: int | None = None,
    timeout_seconds: float = 30.0,
    rootless: bool = True,
    network: str = "none",
    dns: list[str] | None = None,
    capabilities: list[str] | None = None,
    resources: dict[str, float] | None = None,
    readonly: bool = True,
    **kwargs: Any,
) -> Any:
    """Return the handle of an actor that has one sandbox; see Ray's own `create`.

    Args:
        image: a directory of the actor's node, or a workspace of its configuration; the
            sandbox writes into a layer over it, which ends with the sandbox.
        cpu: processors, of the actor and as the child's limit.
        memory: bytes, or such as "1Gi": the same.
        env: variables of its commands.
        workdir: where they begin, beneath the image; None for the image itself.
        ttl_seconds: how long the child may live.
        timeout_seconds: for Ray's form alone: a start takes milliseconds.
        rootless: True.
        network: "none".
        dns: None.
        capabilities: None or an empty list: a child has none.
        resources: of the actor.
        readonly: True: only the image is written to.
        kwargs: `shell`, for commands that are one text.

    Raises:
        SandboxCreationError: something is asked for that is not to be had.
    """
    config = SandboxConfig(
        image=image,
        cpu=cpu or 0.0,
        memory=memory or 0,
        env=env or {},
        workdir=workdir,
        ttl_seconds=ttl_seconds,
        timeout_seconds=timeout_seconds,
        rootless=rootless,
        network=network,
        dns=dns,
        capabilities=capabilities,
        readonly=readonly,
        **_known(kwargs),
    )
    check_config(config)
    Images().pull_image(image)
    # Ray's own actors take a processor where nothing is said; the child has its own.
    options: dict[str, Any] = {"num_cpus": cpu or 0}
    if cpu:
        check_cpu(cpu, ray.cluster_resources())
    size = parse_memory_bytes(memory)
    if size:
        options["memory"] = size
    if resources:
        options["resources"] = resources
    words = {name: getattr(config, name) for name in _PASSED_ON}
    return ray.remote(Sandbox).options(**options).remote(**words)


_PASSED_ON = (
    "image",
    "cpu",
    "memory",
    "env",
    "workdir",
    "ttl_seconds",
    "timeout_seconds",
    "rootless",
    "network",
    "dns",
    "capabilities",
    "readonly",
    "shell",
)
"""Attributes of a configuration of which an actor is made."""

_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "rootless": (lambda value: value is True, "that is gVisor's; leave it out"),
    "network": (
        lambda value: value == "none",
        "give the child's policy a network by name, and use sandhost.fleet.create",
    ),
    "dns": (lambda value: value is None, "a child has no network here; leave it out"),
    "capabilities": (lambda value: not value, "a child has none; leave it out"),
    "readonly": (
        lambda value: value is True,
        "the image is written to in a layer, and nothing beside it; leave it out",
    ),
    "_oci_spec_transform_fn": (lambda value: value is None, "there is no such file"),
    "_ignore_cgroups": (lambda value: not value, "that is gVisor's; leave it out"),
}
"""Tests of attributes' values, each with the remedy for a value that is refused."""


def check_config(config: SandboxConfig) -> None:
    """Refuse what is asked for and is not to be had.

    Raises:
        SandboxCreationError: the text names it.
    """
    for name, (is_had, how) in _REFUSED.items():
        value = getattr(config, name)
        if not is_had(value):
            raise SandboxCreationError(f"cannot have {name}={value!r}: {how}")
    workdir = config.workdir
    if workdir is not None and not f"{workdir}/".startswith(f"{config.image}/"):
        raise SandboxCreationError(
            f"cannot have workdir={workdir!r}: give an image that is a directory, and a"
            " workdir beneath it"
        )


def check_cpu(cpu: float, offered: Mapping[str, float]) -> None:
    """Refuse an actor that would wait for ever: Ray here may offer no processor.

    Args:
        cpu: that are asked for.
        offered: all resources of the cluster.

    Raises:
        SandboxCreationError: the cluster has none; of one that has fewer, more may come.
    """
    if not offered.get("CPU"):
        raise SandboxCreationError(
            f"cannot have cpu={cpu:g}: the cluster offers no processors; leave it out,"
            " or join a raylet that has some"
        )


def _limits_of(config: SandboxConfig) -> dict[str, str]:
    limits = {}
    if config.cpu:
        limits["cpus"] = f"{config.cpu:g}"
    size = parse_memory_bytes(config.memory)
    if size:
        limits["memory"] = str(size)
    return limits


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options beside those of the signature.

    Raises:
        SandboxCreationError: one of them is not known.
    """
    for name in options.keys() - {"shell"}:
        raise SandboxCreationError(f"cannot take {name!r}: leave it out")
    return options
