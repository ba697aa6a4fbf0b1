"""A plain host runs without the extras' packages; what needs one names the extra."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from hostlib.extras import EXTRAS
from tests.architecture.tree import ROOT
from tests.helpers.command import ENVIRONMENT, Outcome, outcome

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]

WITHOUT = """
import sys
HIDDEN = {"openai", "re2", "blake3", "stringzilla", "prometheus_client", "mcp",
          "tree_sitter", "ray", "psycopg"}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from supervisor.__main__ import main
sys.exit(main())
"""


def plain(where: Path, *words: str) -> Outcome:
    """Run the command where no package of an extra is installed."""
    command = (sys.executable, "-c", WITHOUT, *words)
    done = subprocess.run(
        command, cwd=where, env=ENVIRONMENT, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    return outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_plain_host_runs_a_child(tmp_path: Path) -> None:
    done = plain(tmp_path, "run", "--", "sh", "-c", "echo ran; exit 3")
    assert (done.status, done.out, done.err) == (3, b"ran\n", b"")
    (tmp_path / "c.toml").write_text("[toolexec]\n[policy.run]\n")
    done = plain(tmp_path, "run", "--config", "c.toml", "--", "true")
    assert (done.status, done.err) == (0, b"")


# A fault of the configuration: a unit does not try again.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "key", "package", "extra"),
    [
        ("[llm]\n", "llm", "openai", "llm"),
        ("[tools]\nenabled = ['read_fd']\n", "tools", "blake3", "fds"),
        (
            "[metrics]\nlisten = 'tcp://127.0.0.1:0'\n",
            "metrics",
            "prometheus-client",
            "metrics",
        ),
        ("[fleet]\nstore = 'postgresql://h/b'\n", "fleet", "psycopg", "postgres"),
    ],
)
def test_what_needs_a_package_names_its_extra(
    tmp_path: Path, section: str, key: str, package: str, extra: str
) -> None:
    said = f"{key}: the package {package} is not installed; install sandhost[{extra}]"
    places = f"[host]\nruntime_dir = '{tmp_path}/r'\nstate_dir = '{tmp_path}/s'\n"
    (tmp_path / "c.toml").write_text(places + section)
    done = plain(tmp_path, "run", "--config", "c.toml", "--", "true")
    assert done.status == 125
    assert done.said(f"sandhost run: cannot use 'c.toml': {said}")
    done = plain(tmp_path, "serve", "--config", "c.toml")
    assert done.status == 78
    assert done.said(f"sandhost serve: cannot use c.toml: {said}")
    done = plain(tmp_path, "check-config", "c.toml")
    assert (done.status, done.out) == (2, b"")
    assert done.said(f"sandhost check-config: c.toml: {said}")


@pytest.mark.slow
def test_mcp_names_its_extra(tmp_path: Path) -> None:
    done = plain(tmp_path, "mcp")
    assert done.status == 2
    assert done.said("the package mcp is not installed; install sandhost[mcp]")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!\[; ]", text)[0] for text in requirements}


# Ray is apart: its version is the cluster's to say, and it is three times all the others.
def test_all_is_every_extra_of_a_host() -> None:
    extras = set(OPTIONAL) - {"all", "dev", "fuzz", "ray"}
    assert set(OPTIONAL["all"]) == {one for name in extras for one in OPTIONAL[name]}
    for extra, packages in EXTRAS.items():
        assert names(OPTIONAL[extra]) == set(packages.values())
    plain_ones = names(PROJECT["dependencies"])
    assert not plain_ones & names(OPTIONAL["all"])
    assert all(metadata.version(name) for name in plain_ones)


def pinned(file: str) -> dict[str, str]:
    text = (ROOT / file).read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", text, re.MULTILINE))


# Packages for tests and checks are no part of an installation.
def test_what_runs_is_pinned_without_what_tests() -> None:
    runs, develops = pinned("requirements.txt"), pinned("requirements-dev.txt")
    assert runs.items() <= develops.items()
    assert names(PROJECT["dependencies"] + OPTIONAL["all"]) <= set(runs)
    assert not {"pytest", "mypy", "ruff", "hypothesis", "coverage", "pip"} & set(runs)
