"""The verbs of workspaces: each with its arguments, its work, its result.

The command line and a host's control socket both go by this table, so a verb that stands
here can be asked of either, with the same rows. Results are plain JSON values (spec Forms).
"""

from __future__ import annotations

import base64
import contextlib
import errno
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from hostlib.messages import shown_path
from supervisor.workspace.directory import (
    BaseGoneError,
    InUseError,
    WorkspaceError,
    look_at_state,
    read_state,
    workspaces_in,
)
from supervisor.workspace.selection import CommitSelection, Patterns
from supervisor.workspace.sweep import finish_removals
from supervisor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from supervisor.workspace.changes import Row
    from supervisor.workspace.commit import CommitResult
    from supervisor.workspace.directory import State

Tell = tuple[str, dict[str, Any]]


class NoArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``list``."""


class NameArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Of verbs that take a name alone."""

    name: str


class DiffArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``diff``, and of a patch."""

    name: str
    patterns: list[str] = []
    freeze: bool = False
    binary: bool = False


class CommitArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``commit``; patterns as the options of the command."""

    name: str
    only: list[str] = []
    but: list[str] = []
    allow: list[str] = []
    theirs: list[str] = []
    mine: list[str] = []
    skip_conflicts: bool = False
    merge: bool = False
    dry_run: bool = False
    freeze: bool = False


class SnapshotArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``snapshot``."""

    name: str
    label: str | None = None


class RestoreArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``restore``; ``dry_run`` only counts the changes to drop."""

    name: str
    label: str
    dry_run: bool = False


class ForkArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of ``fork``."""

    name: str
    count: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


class ExportArguments(msgspec.Struct, forbid_unknown_fields=True):
    """Of an export."""

    name: str
    form: Literal["patch", "tar"]


class VerbError(Exception):
    """A verb cannot be done; the text is one line for a person."""


class Done(msgspec.Struct):
    """The outcome of a verb.

    Attributes:
        result: plain JSON values.
        notes: lines for a person beside it.
        event: of the journal: a name and its fields; None for none.
    """

    result: Any
    notes: list[str] = []
    event: Tell | None = None


class Verb(NamedTuple):
    """One verb.

    Attributes:
        arguments: their form.
        do: does it in a state directory; blocks.
    """

    arguments: type[Any]
    do: Callable[[str, Any], Done]


def do_verb(state_dir: str, verb: str, words: Mapping[str, Any]) -> Done:
    """Do what is asked; blocks.

    Args:
        state_dir: where workspaces live.
        verb: of ``VERBS``.
        words: its arguments as plain values.

    Raises:
        VerbError: it cannot be done.
    """
    known = VERBS.get(verb)
    if known is None:
        raise VerbError(f"there is no verb {verb!r}, only {', '.join(VERBS)}")
    with word_errors():
        return known.do(state_dir, msgspec.convert(dict(words), known.arguments))


@contextlib.contextmanager
def word_errors() -> Iterator[None]:
    """Turn what goes wrong with a workspace into one line.

    Raises:
        VerbError: something does.
    """
    try:
        yield
    except (WorkspaceError, msgspec.ValidationError) as why:
        raise VerbError(str(why)) from None
    except ValueError as why:  # of a pattern
        raise VerbError(f"cannot use a pattern: {why}; see gitignore(5)") from None
    except OSError as why:
        raise VerbError(word_error(why)) from None


def word_error(why: OSError) -> str:
    """Word an error of the system in a command that has changed nothing by it."""
    name = shown_path(why)
    if why.errno in {errno.ENOSPC, errno.EDQUOT}:
        text = f"cannot write {name or 'to the base or the state directory'}"
        return f"{text}: {why.strerror}; nothing changed: make room, and try again"
    if why.errno == errno.EROFS:
        text = (
            "cannot write to the base or the state directory: it is mounted read-only"
        )
        return f"{text}; nothing changed: mount it to write, or export the changes"
    return f"cannot use {name or 'the workspace'}: {why.strerror}; nothing changed"


# The work of each


def _list(state_dir: str, _: NoArguments) -> Done:
    notes: list[str] = []
    return Done(workspace_rows(state_dir, notes), notes)


def workspace_rows(
    state_dir: str, notes: list[str], *, but: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a state directory's workspaces, without some names.

    Args:
        state_dir: where they are; what killed commands left there half done is ended.
        notes: lines for a person beside the rows are added.
        but: the names.
    """
    names = workspaces_in(state_dir)
    rows = [_row(state_dir, name, notes) for name in names if name not in but]
    notes += finish_removals(state_dir)  # removals of the last commit may be among them
    return rows


def _row(state_dir: str, name: str, notes: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "mode": "review", "snapshots": []}
    row |= {"cut_off": False, "base": "", "created_at": None}
    with contextlib.suppress(WorkspaceError, OSError):
        row |= _find_known(read_state(state_dir, name))
    try:
        with Workspace(state_dir, name) as found:
            notes += end_cut(found)
            child = found.directory.user()
            row |= _find_known(found.state)
            row |= {"state": "in use" if child else found.idle_state(), "child": child}
            rows = found.changes()
            return row | {
                "changed": len(rows),
                "bytes": sum(one.size_bytes for one in rows),
                "cut_off": found.is_cut_off(),
            }
    except InUseError:  # by a command, which may be the end of a run
        state = "in use"
        if look_at_state(state_dir, name) == "idle":
            state, row["child"] = "idle", ""
    except (WorkspaceError, OSError) as why:
        reason = why.strerror if isinstance(why, OSError) else None
        notes.append(f"{name}: {reason or why}")
        state = look_at_state(state_dir, name) or "cannot be read"
    return {"child": None, "changed": None, "bytes": None} | row | {"state": state}


def _find_known(state: State) -> dict[str, Any]:
    """Return what a row has of a workspace whose changes are not known."""
    made = datetime.fromtimestamp(state.created_ns / 1e9, UTC)
    return path_fields("base", state.base) | {
        "base": state.base.decode(errors="replace"),  # for a table
        "created_at": made.isoformat().replace("+00:00", "Z"),
        "snapshots": state.labels(),
    }


def _diff(state_dir: str, args: DiffArguments) -> Done:
    with _open_workspace(state_dir, args.name) as (found, notes):
        with stop_or_note(found, notes, is_asked=args.freeze):
            with _other(state_dir, args) as other:
                if other is None:
                    rows = found.changes(Patterns(args.patterns))
                else:
                    rows = found.compare_with(other)
        notes.extend(full_notes(found))
        return Done([diff_row(row) for row in rows], notes)


def full_notes(found: Workspace) -> list[str]:
    """Return the note of a look for whose record its disk had no room; else none."""
    if found.has_room:
        return []
    how = "make room, or drop what is large: 'sandhost workspace commit NAME --only P --mine P'"
    return [f"{found.name}: nothing was recorded, for the disk is full; {how}"]


def write_patch(state_dir: str, args: DiffArguments, file: int) -> list[str]:
    """Write the changes as a patch into a file; return what a person is to be told.

    Whole before anything of it is sent: a slow reader keeps no child stopped.

    Raises:
        VerbError: it cannot be made.
    """
    with word_errors(), _open_workspace(state_dir, args.name) as (found, notes):
        with stop_or_note(found, notes, is_asked=args.freeze):
            with _other(state_dir, args) as other:
                if other is None:
                    pieces = found.patch(Patterns(args.patterns), binary=args.binary)
                else:
                    pieces = found.patch_to(other, binary=args.binary)
                with open(file, "wb", closefd=False) as target:
                    target.writelines(pieces)
        return notes


def write_export(state_dir: str, args: ExportArguments, file: int) -> list[str]:
    """Write the changes into a file, in a form of ``export``; as ``write_patch``.

    Raises:
        VerbError: it cannot be made.
    """
    with word_errors(), _open_workspace(state_dir, args.name) as (found, notes):
        with (
            stop_or_note(found, notes, is_asked=False),
            open(file, "wb", closefd=False) as target,
        ):
            found.write_export(args.form, target)
        return notes


def _commit(state_dir: str, args: CommitArguments) -> Done:
    selection = CommitSelection(
        only=Patterns(args.only),
        but=Patterns(args.but),
        allow=Patterns(args.allow),
        theirs=Patterns(args.theirs),
        mine=Patterns(args.mine),
        skips_conflicts=args.skip_conflicts,
        merges=args.merge,
    )
    with (
        _open_workspace(state_dir, args.name) as (found, notes),
        found.stopped() if args.freeze else contextlib.nullcontext(),
    ):
        result = found.commit(selection, is_dry=args.dry_run, is_frozen=args.freeze)
        is_done = not (result.left or result.is_refused or args.dry_run)
        if is_done and not (found.directory.user() or found.state.snapshots):
            try:
                found.discard()
            except OSError as why:
                text = f"all is committed, but it cannot be removed: {why.strerror}"
                how = f"'sandhost workspace discard {found.name}'"
                notes.append(f"{found.name}: {text}; {how}")
    event = None if args.dry_run else event_of_commit(result)
    return Done(commit_row(result), notes, event)


def event_of_commit(result: CommitResult) -> Tell:
    """Return what the journal is told of a commit."""
    counts = {"conflicts": len(result.conflicts), "guarded": len(result.guarded)}
    if result.is_refused:
        return "workspace.conflict", counts
    counts |= {"applied": len(result.applied), "left": len(result.left)}
    counts["merged"] = len(result.merged)
    return "workspace.committed", counts


def _discard(state_dir: str, args: NameArguments) -> Done:
    notes: list[str] = []
    with Workspace(state_dir, args.name) as found:
        try:
            changed = len(found.changes())
        except BaseGoneError:  # there is nothing to compare with
            changed = 0
            notes.append(f"{args.name}: its base is gone, and its changes with it")
        except OSError as why:
            changed = 0
            notes.append(f"{args.name}: its changes were not counted: {why.strerror}")
        if left := found.discard():
            notes.append(f"{args.name}: {left}")
    return Done(None, notes, ("workspace.discarded", {"changed": changed}))


def _snapshot(state_dir: str, args: SnapshotArguments) -> Done:
    with _open_workspace(state_dir, args.name) as (found, notes):
        done = found.snapshot(args.label)
    row = {
        "label": done.label,
        "copied_bytes": done.copied_bytes,
        "stopped_ns": done.stopped_ns,
    }
    return Done(row, notes, ("workspace.snapshot", row))


def _restore(state_dir: str, args: RestoreArguments) -> Done:
    with _open_workspace(state_dir, args.name) as (found, notes):
        found.directory.check_idle()  # before a person is asked
        lost = len(found.changes_since(args.label))
        if args.dry_run:
            return Done({"lost": lost}, notes)
        found.restore(args.label)
    counts = {"label": args.label, "lost": lost}
    return Done({"lost": lost}, notes, ("workspace.restored", counts))


def _fork(state_dir: str, args: ForkArguments) -> Done:
    with _open_workspace(state_dir, args.name) as (found, notes):
        return Done(found.fork(args.count), notes)


VERBS: dict[str, Verb] = {
    "list": Verb(NoArguments, _list),
    "diff": Verb(DiffArguments, _diff),
    "commit": Verb(CommitArguments, _commit),
    "discard": Verb(NameArguments, _discard),
    "snapshot": Verb(SnapshotArguments, _snapshot),
    "restore": Verb(RestoreArguments, _restore),
    "fork": Verb(ForkArguments, _fork),
}


@contextlib.contextmanager
def _open_workspace(state_dir: str, name: str) -> Iterator[tuple[Workspace, list[str]]]:
    with Workspace(state_dir, name) as found:
        yield found, end_cut(found)


def end_cut(found: Workspace) -> list[str]:
    """End a commit that was interrupted; return what a person is to be told.

    Of that commit where it is not in the base, and of what the last run has left.
    """
    texts = []
    if text := found.finish_and_word():
        texts.append(text)
    if found.is_cut_off():
        text = "its last run (durable = false) was cut off before it was synced"
        how = "if the machine went down, what was written may be damaged"
        texts.append(f"{text}; {how}")
    if label := found.state.goes_back_to:
        text = f"its child has asked for snapshot {label}"
        texts.append(f"{text}; the workspace goes back to it before the next run")
    return [f"{found.name}: {text}" for text in texts]


@contextlib.contextmanager
def _other(state_dir: str, args: DiffArguments) -> Iterator[Workspace | None]:
    """Give the workspace that a single pattern names; None if it names none."""
    (word,) = args.patterns if len(args.patterns) == 1 else ("",)
    if word not in workspaces_in(state_dir):
        yield None
        return
    with _open_workspace(state_dir, word) as (other, _):
        yield other


def stop_or_note(
    found: Workspace, notes: list[str], *, is_asked: bool
) -> contextlib.AbstractContextManager[None]:
    """Stop the child that has a workspace, if that is asked; else note that it runs."""
    if is_asked:
        return found.stopped()
    if child := found.directory.user():
        text = f"child {child} is at work, so this may be torn; see --freeze"
        notes.append(f"{found.name}: {text}")
    return contextlib.nullcontext()


# Rows


def diff_row(row: Row) -> dict[str, Any]:
    """Return a changed path as it is printed with ``--json``."""
    found = path_fields("path", row.path or b".") | {"change": row.change.value}
    if row.origin is not None:
        found |= path_fields("from", row.origin)
    found |= {"kind": row.kind, "size": row.size_bytes, "mode": row.mode}
    if row.old_size_bytes is not None:
        found["old_size"] = row.old_size_bytes
    return found


def path_in(row: Mapping[str, Any] | str) -> bytes:
    """Return the path that a row, or a plain path of a list, stands for."""
    if isinstance(row, str):
        return row.encode()
    if "path" in row:
        return str(row["path"]).encode()
    return base64.b64decode(row["path_b64"])


def path_fields(key: str, path: bytes) -> dict[str, Any]:
    """Return a path as a field of a row: as text, or in base64 if it is not UTF-8."""
    try:
        return {key: path.decode()}
    except UnicodeDecodeError:
        return {f"{key}_b64": base64.b64encode(path).decode()}


def commit_row(result: CommitResult) -> dict[str, Any]:
    """Return what a commit did as it is printed with ``--json``."""
    conflicts = [
        path_fields("path", one.path) | {"reason": one.reason}
        for one in result.conflicts
    ]
    return {
        "applied": [_plain(path) for path in result.applied],
        "conflicts": conflicts,
        "guarded": [_plain(path) for path in result.guarded],
        "hidden": [_plain(path) for path in sorted(result.hidden)],
        "left": [_plain(path) for path in result.left],
        "merged": [_plain(path) for path in result.merged],
    }


def _plain(path: bytes) -> str | dict[str, Any]:
    found = path_fields("path", path)
    return found.get("path", found)  # type: ignore[no-any-return]
