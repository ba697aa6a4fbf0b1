"""The documents are whole: links lead somewhere, decisions have their four parts."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from docs import generate
from hostlib.journal import EVENTS
from supervisor.config.child import ChildSection
from supervisor.config.host import HostSection
from supervisor.config.loader import load_config, warnings
from supervisor.config.policy import PolicySection
from tests.architecture.tree import PACKAGES, ROOT, relative, tree_files

PAGES = tuple(path for path in tree_files() if path.suffix == ".md")
DECISIONS = tuple(sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")))
OLD = ROOT / "docs" / "adr" / "old"
OLD_DECISIONS = tuple(sorted(OLD.glob("[0-9]*.md")))
MAX_DECISION_LINES = 60
HISTORY = frozenset({"CHANGELOG.md"})
"""It names decisions by the numbers that they had then."""


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, made as the usual renderers make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {word.strip().replace(" ", "-") for word in words}


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a page has what it links to; an address elsewhere is not asked."""
    name, _, anchor = link.partition("#")
    if ":" in name:
        return True
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in headings(target))


def test_every_link_within_the_project_leads_somewhere() -> None:
    assert not [
        f"{relative(page)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not leads_somewhere(page, link)
    ]


def endings() -> frozenset[str]:
    """Return every way to name a file or a directory by the end of its path."""
    found = set()
    for path in tree_files():
        parts = path.relative_to(ROOT).parts
        for first in range(len(parts)):
            found |= {
                "/".join(parts[first:last]) for last in range(len(parts), first, -1)
            }
    return frozenset(found)


ENDINGS = endings()
NAMED = re.compile(
    r"`((?:test_\w+|(?!/)[\w./-]+/\w+)\.py)`"  # a test, or a path of a module
    rf"|`((?:{'|'.join((*PACKAGES, 'tests', 'benchmarks', 'systemd'))})(?:/[\w.-]+)*)/?`"
)
"""How a page names a file or a directory of this tree."""

BESIDE = re.compile(r"`((?!/)[\w./-]+/)\w+\.py`((?:(?:,|,? and|,? or)\s+`\w+\.py`)+)")
"""How a page names further files beside one: ``(`a/b.py`, `c.py`)``."""


def names_beside(text: str) -> set[str]:
    """Return the paths of files that a text names beside one, without their directory."""
    return {
        directory + name
        for directory, others in BESIDE.findall(text)
        for name in re.findall(r"\w+\.py", others)
        if not name.startswith("test_")
    }


# A person finds the file from the documents and the tree alone.
def test_every_path_in_a_document_exists() -> None:
    assert not [
        f"{relative(page)}: {name}"
        for page in PAGES
        if page.name not in HISTORY and page.parent != OLD
        for pair in NAMED.findall(page.read_text(encoding="utf-8"))
        for name in pair
        if name and name not in ENDINGS
    ]


def test_every_file_that_a_document_names_beside_another_exists() -> None:
    assert not [
        f"{relative(page)}: {name}"
        for page in PAGES
        if page.name not in HISTORY and page.parent != OLD
        for name in names_beside(page.read_text(encoding="utf-8"))
        if name not in ENDINGS
    ]


def has_four_parts_and_is_short(page: Path) -> bool:
    """Return whether a decision has the form of all."""
    text = page.read_text(encoding="utf-8")
    parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
    is_short = text.count("\n") <= MAX_DECISION_LINES
    return is_short and parts == ["Context", "Decision", "Consequence", "Evidence"]


def test_a_decision_has_four_parts_and_is_short() -> None:
    assert DECISIONS
    wrong = [page for page in DECISIONS if not has_four_parts_and_is_short(page)]
    assert not [relative(page) for page in wrong]


def first_line(page: Path) -> str:
    """Return the first line of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0]


# A reader who looks for a subject finds its decision by the title.
def test_a_decision_is_titled_by_its_topic() -> None:
    title = r"# {}\. [^:]{{2,50}}: [^:]+"
    assert not [
        f"{relative(page)}: {first_line(page)}"
        for page in DECISIONS
        if not re.fullmatch(title.format(int(page.name[:4])), first_line(page))
    ]


def test_an_old_decision_names_first_what_replaced_it() -> None:
    assert OLD_DECISIONS
    known = {page.name for page in DECISIONS}
    for page in OLD_DECISIONS:
        named = set(re.findall(r"\]\(\.\./([^)]+)\)", first_line(page)))
        assert named, relative(page)
        assert named <= known, relative(page)


def test_every_decision_is_listed_once() -> None:
    index = (ROOT / "docs/adr/README.md").read_text(encoding="utf-8")
    present, _, older = index.partition("\n## Older numbers\n")
    listed = re.findall(r"^\| \[\d{4}\]\((\d{4}-[^)]+)\)", present, re.MULTILINE)
    assert listed == [page.name for page in DECISIONS]
    listed = re.findall(r"\]\(old/([^)]+)\)", older)
    assert listed == [page.name for page in OLD_DECISIONS]


# A number that was merged into another decision is found by the index alone.
def test_every_decision_that_is_named_is_in_force() -> None:
    in_force = {int(page.name[:4]) for page in DECISIONS}
    wrong = []
    for path in tree_files():
        if path.parent in (OLD, OLD.parent) or path.name in HISTORY:
            continue
        if path.suffix in {".md", ".py", ".toml", ".service", ".conf"}:
            text = path.read_text(encoding="utf-8")
            named = re.findall(r"\bADR (\d+)\b(?!\]\([^)]*/old/)", text)
            named += re.findall(r"docs/adr/(\d{4})\b", text.replace("adr/old/", ""))
            wrong += [f"{relative(path)}: {n}" for n in named if int(n) not in in_force]
    assert not wrong


def test_what_is_generated_is_what_is_committed() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_status_of_an_attack_is_the_tests_that_name_it() -> None:
    page = "| | attack | waits for | covered by |\n| 1 | a claim | | stale |\n| 25 | b | c | |\n"
    renewed = generate.security(page, {"1": ("tests/a.py", "tests/b.py")})
    assert "| 1 | a claim |  | `tests/a.py`, `tests/b.py` |" in renewed
    assert "| 25 | b | c | not covered yet |" in renewed
    assert generate.security(renewed, {"1": ("tests/a.py", "tests/b.py")}) == renewed


def test_the_tests_of_an_invariant_are_those_that_name_it() -> None:
    page = "## I1. A\n\nText.\n\nNamed by: x\n\n## I2. B\n\nNamed by: y\n"
    assert generate.invariants(page, {"I2": ("tests/a.py",)}) == (
        "## I1. A\n\nText.\n\nNamed by: no test yet\n\n## I2. B\n\nNamed by: `tests/a.py`\n"
    )


def places_told(page: str) -> dict[str, set[str]]:
    """Return the names in each table of the map, by what they are beneath."""
    told = {}
    for table in page.split("\n\n"):
        rows = [line.split("|")[1] for line in table.splitlines() if line[:1] == "|"]
        if rows:
            (beneath,) = re.findall(r"`(\w+)/`", rows[0]) or [""]
            told[beneath] = set(re.findall(r"`([^`]+)`", "".join(rows[2:])))
    return told


def places_there() -> dict[str, set[str]]:
    """Return what there is: folders and files of each package; the other folders."""
    there: dict[str, set[str]] = {"": set(), **{package: set() for package in PACKAGES}}
    for path in tree_files():
        first, *more = path.relative_to(ROOT).parts
        if first in PACKAGES:
            name = more[0] + "/" * (len(more) > 1)
            there[first] |= {name} if name != "py.typed" else set()
        elif more:
            there[""].add(f"{first}/")
    return there


# A file that nobody finds is written a second time.
@pytest.mark.parametrize("beneath", [*PACKAGES, ""])
def test_the_map_names_what_is_there(beneath: str) -> None:
    told = places_told(
        (ROOT / "docs" / "reference" / "map.md").read_text(encoding="utf-8")
    )[beneath]
    there = places_there()[beneath]
    found = {pattern: set(fnmatch.filter(there, pattern)) for pattern in told}
    assert not there - set().union(*found.values())
    assert not {
        pattern
        for pattern, names in found.items()
        if not names and not (ROOT / pattern).is_file()
    }


EXAMPLES = tuple(
    (page, number, text)
    for page in PAGES
    for number, text in enumerate(
        re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
)


def there(where: Path, text: str) -> str:
    """Return an example whose files and directories are made, beneath a directory."""

    def place(match: re.Match[str]) -> str:
        path = where / match[2].lstrip("/")
        if match[1].startswith(("api_key_file", "file")) or "passfile" in match[1]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text("a" * 40)
        else:
            path.mkdir(parents=True, exist_ok=True)
        return f'{match[1]}{path}"'

    named = r'(\w+ = \[?"(?:[^"]*passfile=)?)(/(?:etc|srv)/[^"]*)"'
    return re.sub(named, place, text)


@pytest.mark.parametrize(
    ("page", "number", "text"),
    EXAMPLES,
    ids=[f"{relative(page)}-{number}" for page, number, _ in EXAMPLES],
)
def test_every_configuration_in_a_document_can_be_used(
    tmp_path: Path, page: Path, number: int, text: str
) -> None:
    del page, number
    config = tmp_path / "example.toml"
    config.write_text(there(tmp_path, text))
    assert not list(warnings(load_config(str(config))))


def beginnings() -> set[str]:
    """Return how the errors begin that the code answers with, as it has them."""
    found = set()
    for path in tree_files():
        if path.suffix == ".py" and path.parts[len(ROOT.parts)] in PACKAGES:
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r'\berror\(\s*b"([^"%]+)', text))
            found |= set(re.findall(r'b"ERROR ([^"%]+)', text))
    return found


def test_every_reply_of_the_code_is_in_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    replies = page.partition("\n## Replies\n")[2].partition("\n## ")[0]
    told = {text for text in beginnings() if " requires " not in text}  # F9
    assert len(told) > 20
    assert not {text for text in told if text.rstrip(" :'") not in replies}


def test_every_event_of_the_journal_is_told_to_operators() -> None:
    page = (ROOT / "docs" / "reference" / "journal.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([a-z]+\.[a-z_]+)`", page))
    assert told == set(EVENTS)


# Where a key is not told, an operator finds it in an error message, if at all.
@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("host", HostSection),
        ("policy.NAME", PolicySection),
        ("child.NAME", ChildSection),
    ],
)
def test_every_key_of_the_daemon_has_its_row(
    name: str, section: type[msgspec.Struct]
) -> None:
    page = (ROOT / "docs" / "reference" / "daemon.md").read_text(encoding="utf-8")
    table = page.partition(f"\n| key of `[{name}]` |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line[:1] == "|"]
    told = re.findall(r"`([a-z_]+)`", "".join(rows))
    assert sorted(told) == sorted(section.__struct_fields__)
