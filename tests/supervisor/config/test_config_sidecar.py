"""`[sidecar.NAME]`: what it may say."""

from typing import Any

import msgspec
import pytest

from hostlib.user_values import join_key
from supervisor.toolexec.sidecar_section import SidecarSection, check_sidecars

CONTAINER = {"kind": "go", "backend": "docker", "image": "i", "workspace": "/w"}


def faults(name: str = "x", **section: Any) -> list[tuple[str, str]]:
    """Check one section."""
    known = msgspec.convert({"kind": "go", **section}, type=SidecarSection)
    return list(check_sidecars({name: known}))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"workspace": "/w", "path": ["/a", "/b"], "env": {"A": "1", "B": ""}},
        {"allow": []},
        {"allow": ["jq", "g++", "a.b-c_d+"]},
        {"start": ["server", ""], "timeout": "90s", "tty": True, "fd3": True},
        {"start": ["server"], "sandbox": "required"},
        {"limits": {"memory": "1G", "cpu": 60, "processes": 64}},
        CONTAINER,
        {**CONTAINER, "backend": "podman", "cli": "/usr/bin/podman"},
    ],
)
def test_what_a_section_may_say(section: dict[str, Any]) -> None:
    assert faults(**section) == []


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("kind", {"kind": "cobol"}),
        ("backend", {**CONTAINER, "backend": "lxc"}),
        ("allow", {"allow": ["/bin/sh"]}),
        ("allow", {"allow": ["-c"]}),
        ("allow", {"allow": ["a b"]}),
        ("path", {"path": ["bin"]}),
        ("path", {"path": ["/a:/b"]}),
        ("env", {"env": {"": "1"}}),
        ("env", {"env": {"A=B": "1"}}),
        ("env", {"env": {"PATH": "/evil"}}),
        ("start", {"start": []}),
        ("start", {"start": [""]}),
        ("workspace", {"workspace": "w"}),
        ("timeout", {"timeout": "soon"}),
        ("limits.wishes", {"limits": {"wishes": 3}}),
        ("limits.files", {"limits": {"files": 3}}),
        ("image", {"image": "i"}),
        ("cli", {"cli": "/bin/docker"}),
        ("cli", {**CONTAINER, "cli": "docker"}),
        ("image", {**CONTAINER, "image": ""}),
        ("workspace", {**CONTAINER, "workspace": None}),
        ("workspace", {**CONTAINER, "workspace": "/a:b"}),
        ("fd3", {**CONTAINER, "fd3": True}),
        ("tty", {**CONTAINER, "tty": True}),
        ("sandbox", {"sandbox": "some"}),
        ("sandbox", {**CONTAINER, "sandbox": "none"}),
        ("limits", {**CONTAINER, "limits": {"cpu": 1}}),
    ],
)
def test_what_it_may_not(key: str, section: dict[str, Any]) -> None:
    ((where, reason),) = faults(**section)
    assert where == f"x.{key}"
    assert reason


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "x" * 64, "é"])
def test_a_name_is_one_for_files_and_containers(name: str) -> None:
    ((where, _),) = faults(name)
    assert where == join_key(name)
