"""Texts that the tree may not hold.

Addresses in pins, paths of somebody's machine.

The tree must install from any index and run in any place, so neither may stand in it.
"""

import re
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, relative, tree_files

REQUIREMENTS = tuple(sorted(ROOT.glob("requirements*.txt")))

# Options that name an index, and anything that looks like an address.
ADDRESS = re.compile(
    r"://|--(?:extra-)?index-url|--find-links|--trusted-host|^-[if]\b|\s@\s",
    re.MULTILINE,
)
PIN = re.compile(r"^[A-Za-z0-9._-]+==\S+(?: ;[^\\\n]*)? \\$")

# Public and private package registries, whatever stands before their names.
REGISTRY = re.compile(
    r"\b(?:py\W?pi|python-?hosted|npmjs|crates|rubygems|anaconda|artifactory|jfrog"
    r"|gemfury|devpi)\.(?:org|com|io|net|dev)\b",
    re.IGNORECASE,
)
# Absolute names that exist on the machine of the one who wrote them, and nowhere else.
# (/opt/sandhost is where the units expect it.)
MACHINE_PATH = re.compile(
    r"(?<![\w.\-/$}])/(?:work|root|opt/(?!sandhost\b)\w+|home/\w+|Users/\w+|tmp/yard)/[\w.]"
)


def findings(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return "line: match" for each place of a text where a pattern is found."""
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for match in pattern.finditer(text)
    ]


def test_there_are_requirements() -> None:
    assert ROOT / "requirements.txt" in REQUIREMENTS
    assert ROOT / "requirements-dev.txt" in REQUIREMENTS
    assert ROOT / "requirements-fuzz.txt" in REQUIREMENTS


@pytest.mark.parametrize("path", REQUIREMENTS, ids=relative)
def test_requirements_hold_no_address(path: Path) -> None:
    assert not findings(path.read_text(encoding="utf-8"), ADDRESS)


@pytest.mark.parametrize("path", REQUIREMENTS, ids=relative)
def test_every_requirement_is_pinned_with_a_hash(path: Path) -> None:
    blocks = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip())
    packages = [block for block in blocks if not block.startswith("#")]
    assert packages
    wrong = [
        block.splitlines()[0]
        for block in packages
        if not PIN.match(block.splitlines()[0]) or "--hash=sha256:" not in block
    ]
    assert not wrong


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE_PATH], ids=["registry", "path"])
def test_no_file_names_a_registry_or_a_machine(pattern: re.Pattern[str]) -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in tree_files()
        for line in findings(path.read_text("utf-8", errors="replace"), pattern)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("--index-url x", ADDRESS),
        ("a==1 # via ftp" + "://x", ADDRESS),
        ("-i x", ADDRESS),
        ("a @ file", ADDRESS),
        ("see files.python" + "hosted.org/x", REGISTRY),
        ("see PyPI" + ".org", REGISTRY),
        ("cd /wo" + "rk/main", MACHINE_PATH),
        ('"/ro' + 'ot/.cache"', MACHINE_PATH),
        ("/ho" + "me/jo/x", MACHINE_PATH),
    ],
)
def test_the_check_sees_an_offence(text: str, pattern: re.Pattern[str]) -> None:
    assert findings(f"first line\n{text}\n", pattern)


@pytest.mark.parametrize(
    "text",
    ["/root-evil", "/proc/self/root/etc", "$X/work/a", "/tmp/x", "src/root/a", "a.org"],
)
def test_the_check_lets_ordinary_names_pass(text: str) -> None:
    assert not findings(text, REGISTRY) + findings(text, MACHINE_PATH)
