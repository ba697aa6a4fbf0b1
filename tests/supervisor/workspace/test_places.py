"""Where workspaces are kept if nothing is said, and what goes before what."""

import os

import pytest

from supervisor.cli.workspace_options import find_state_dir


# spec Forms
@pytest.mark.parametrize(
    ("asked", "variables", "user", "place"),
    [
        ("/asked", {"SANDHOST_STATE": "/set"}, 0, "/asked"),
        (None, {"SANDHOST_STATE": "/set", "XDG_STATE_HOME": "/xdg"}, 1234, "/set"),
        (None, {"XDG_STATE_HOME": "/xdg"}, 1234, "/xdg/sandhost"),
        (None, {}, 1234, "/own/.local/state/sandhost"),
        (None, {"XDG_STATE_HOME": "/xdg"}, 0, "/var/lib/sandhost"),
    ],
)
def test_the_state_directory_is_the_one_asked_for_or_the_user_s(
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    variables: dict[str, str],
    user: int,
    place: str,
) -> None:
    for name in ("SANDHOST_STATE", "XDG_STATE_HOME", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/own", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert find_state_dir(asked) == place
