"""Trying what profiles require in a host that has children: a reload, and what it leaves."""

import errno
import os
from pathlib import Path

import pytest

from supervisor.config.document import load_config
from supervisor.control.orders import DaemonOrders
from supervisor.control.server import OrderError
from supervisor.profile_trials import try_profiles
from supervisor.sandbox import walled
from supervisor.sandbox.plan import missing_layer
from tests.helpers.hosts import opened

pytestmark = pytest.mark.slow

CONFIG = "[sandbox.s]\nrequired = ['no_new_privs']\n[policy.p]\nsandbox = 's'\n"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A configuration with a profile that requires a layer."""
    file = tmp_path / "c.toml"
    file.write_text(CONFIG)
    return str(file)


# What a start tells, and no look at the kernel.
async def test_a_reload_is_refused_for_what_fails_when_it_is_tried(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise missing_layer("no_new_privs", "not today", errno.EPERM)

    monkeypatch.setattr(walled, "spawn", fail)
    async with opened(tmp_path) as stage:
        orders = DaemonOrders(stage.host, None, path)  # type: ignore[arg-type]
        said = "policy.p.sandbox: 'no_new_privs', which is required, is missing: not"
        with pytest.raises(OrderError, match=f"not reloaded: .*{said} today"):
            await orders.reload()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's have users of their own")
# A daemon is told to reload as often as somebody likes.
async def test_a_trial_gives_its_user_back(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    users: list[int] = []
    async with opened(tmp_path) as stage:
        host = stage.host
        take = host.machine.take_user

        def take_and_note() -> int:
            users.append(take())
            return users[-1]

        monkeypatch.setattr(host.machine, "take_user", take_and_note)
        for _ in range(3):
            found = await try_profiles(host.launcher, host.machine, load_config(path))
            assert not found.faults
        assert len(users) == 3
        assert not host.machine._users
