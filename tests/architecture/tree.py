"""The files that the architecture tests look at, found without git.

Reads `.gitignore` itself, so that the same files are seen in a checkout, in an unpacked
archive and in a copy, committed yet or not.
"""

import ast
from functools import cache
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "hostlib", "vfs", "supervisor", "sandhost")


@cache
def tree_files() -> tuple[Path, ...]:
    """Return every file of the project that is not ignored, sorted."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    return tuple(sorted(_walk(ROOT, GitIgnoreSpec.from_lines([*lines, ".git"]))))


def _walk(directory: Path, ignored: GitIgnoreSpec) -> list[Path]:
    found: list[Path] = []
    for entry in directory.iterdir():
        name = entry.relative_to(ROOT).as_posix()
        is_directory = entry.is_dir() and not entry.is_symlink()
        if ignored.match_file(f"{name}/" if is_directory else name):
            continue
        if is_directory:
            found += _walk(entry, ignored)
        elif entry.is_file():
            found.append(entry)
    return found


@cache
def product_files() -> tuple[Path, ...]:
    """Return the Python files of the packages, sorted."""
    return tuple(
        path
        for path in tree_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES
    )


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a syntax tree: most checks look at all, and a walk is slow."""
    return tuple(ast.walk(tree))


def module_name(path: Path) -> str:
    """Return the dotted name under which a file of the project is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def relative(path: Path) -> str:
    """Return a file's name as a reader of the project knows it."""
    return path.relative_to(ROOT).as_posix()
