"""The page of the protocol says what the code says."""

import runpy
import sys
from pathlib import Path

import pytest

from protocol import COMMANDS, limits, reference

EMPTY = (
    "# Page\n\n<!-- generated: commands -->\n<!-- end of generated: commands -->\n"
    "between\n<!-- generated: limits -->\nSTALE\n<!-- end of generated: limits -->\nend\n"
)


def test_the_page_of_this_project_is_not_stale() -> None:
    assert reference.main(["--check"]) == 0


def test_the_table_has_a_row_for_every_command() -> None:
    rows = reference.describe_commands().splitlines()[2:]
    assert [row.split()[1].strip("`") for row in rows] == [
        word.decode() for word in COMMANDS
    ]
    assert all(row.count(" | ") == 4 for row in rows)
    assert any(row.startswith("| `FD_PUT size [token]` | size bytes |") for row in rows)


def test_the_table_has_a_row_for_every_limit() -> None:
    text = reference.describe_limits()
    names = [name for name in vars(limits) if name.isupper()]
    assert len(text.splitlines()) == 2 + len(names)
    assert "| `MAX_LINE_BYTES` | 65,536 | Longest request line before its LF" in text
    assert not [name for name in names if f"| `{name}` | " not in text]


def test_a_page_is_renewed_between_its_markers() -> None:
    text = reference.renew(EMPTY)
    assert text.startswith("# Page\n\n<!-- generated: commands -->\n\n| request line |")
    assert "between" in text
    assert "STALE" not in text
    assert text.endswith("<!-- end of generated: limits -->\nend\n")
    assert reference.renew(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Page\n",
        EMPTY.replace("<!-- generated: limits -->\n", ""),
        EMPTY.replace("<!-- end of generated: commands -->\n", ""),
        EMPTY + EMPTY,
    ],
)
def test_a_page_without_a_place_is_left_alone(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert reference.main([str(page)]) == 2
    assert page.read_text(encoding="utf-8") == text
    told = capsys.readouterr().err
    assert told.startswith(f"cannot renew the reference in {page}: it needs <!-- ")
    assert told.count("\n") == 1


def test_a_stale_page_is_told_and_renewed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY, encoding="utf-8")
    assert reference.main(["--check", str(page)]) == 1
    assert f"{page} is stale: run `python -m protocol.reference`" in (
        capsys.readouterr().err
    )
    assert page.read_text(encoding="utf-8") == EMPTY
    assert reference.main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == reference.renew(EMPTY)
    assert reference.main(["--check", str(page)]) == 0


def test_a_page_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main([str(tmp_path / "none.md")]) == 2
    assert "none.md: [Errno 2] No such file" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["a", "b"], ["--chek"], ["--check", "a", "b"]])
def test_wrong_arguments_are_told_how_it_is_used(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main(arguments) == 2
    assert capsys.readouterr().err == reference.USAGE


def test_it_runs_as_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["reference", str(page)])
    monkeypatch.delitem(sys.modules, "protocol.reference")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("protocol.reference", run_name="__main__")
    assert ended.value.code == 0
    assert page.read_text(encoding="utf-8") == reference.renew(EMPTY)
