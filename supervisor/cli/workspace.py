"""``sandhost workspace``: looks at the changes of a program, and decides on them."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import (
    CommandError,
    UsageFault,
    print_bytes,
    print_text,
    show_controls,
)
from supervisor.cli.help import Command, Group
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option
from supervisor.cli.options import directories, files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hostlib.journal import Journal
    from supervisor.workspace.selection import Patterns
    from supervisor.workspace.workspace import Workspace

CHANGED, REFUSED = 1, 1
"""Exit statuses of ``diff``, as diff(1), and of a refused commit."""

state_dir_option = click.option(
    "--state-dir",
    metavar="DIR",
    shell_complete=directories,
    help="Where workspaces are kept; else $SANDHOST_STATE, or the user's own.",
)
journal_option = click.option(
    "--journal",
    metavar="F",
    shell_complete=files,
    help="Append the event to a file; a daemon has a journal of its own.",
)
freeze_option = click.option(
    "--freeze", "is_frozen", is_flag=True, help="Stop a child's processes meanwhile."
)


_COMMIT_OPTIONS = (
    click.argument("patterns", metavar="[PATTERN]...", nargs=-1),
    click.option(
        "--only", metavar="PATTERN", multiple=True, help="As PATTERN; repeatable."
    ),
    click.option(
        "--except", "but", metavar="PATTERN", multiple=True, help="Leave these."
    ),
    click.option(
        "--allow", metavar="PATTERN", multiple=True, help="Take these though guarded."
    ),
    click.option(
        "--theirs", metavar="PATTERN", multiple=True, help="The workspace's side wins."
    ),
    click.option(
        "--mine", metavar="PATTERN", multiple=True, help="The base's side wins."
    ),
    click.option("--skip-conflicts", is_flag=True, help="Leave what is in conflict."),
    click.option("--merge", is_flag=True, help="Merge text that both sides changed."),
    click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    freeze_option,
)


def commit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose what a commit takes, in their order."""
    for option in reversed(_COMMIT_OPTIONS):
        command = option(command)
    return command


def commit_words(how: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the verb `commit` for these options and patterns."""
    words: dict[str, Any] = {
        key: list(how[key]) for key in ("but", "allow", "theirs", "mine")
    }
    words["only"] = [*how["patterns"], *how["only"]]
    words["freeze"] = how["is_frozen"]
    for key in ("skip_conflicts", "merge", "dry_run"):
        if how[key]:
            words[key] = True
    return words


@click.group(
    cls=Group,
    no_args_is_help=False,  # an error is one line
    epilog="Example: sandhost workspace diff repo-1a2b3c --stat",
)
def workspace() -> None:
    """Look at changes; commit or discard them."""


@workspace.command(
    "list", cls=Command, epilog="Example: sandhost workspace list --json"
)
@state_dir_option
@control_option
@json_option
def list_workspaces(
    state_dir: str | None, control: str | None, *, as_json: bool
) -> int:
    """List the workspaces."""
    from supervisor.cli.workspace_options import find_state_dir  # noqa: PLC0415
    from supervisor.cli.workspace_target import (  # noqa: PLC0415
        NotThereError,
        find_daemon,
        show_notes,
    )
    from supervisor.observe import tables  # noqa: PLC0415 - only this command needs it
    from supervisor.workspace.verbs import workspace_rows  # noqa: PLC0415

    rows: list[dict[str, Any]] = []
    daemon = find_daemon(state_dir, control)
    if daemon is not None:
        with contextlib.suppress(NotThereError):
            rows = daemon.ask("list", {})
    if daemon is None or not daemon.is_named:
        known = {row["name"] for row in rows}
        notes: list[str] = []
        rows += workspace_rows(find_state_dir(state_dir), notes, but=known)
        show_notes(notes)
    if as_json:
        _print_json(rows)
    elif rows:
        print_text(tables.render_for_stdout(tables.TABLES["workspaces"], rows))
    return 0


@workspace.command(
    cls=Command, epilog="Example: sandhost workspace diff repo-1a2b3c --stat"
)
@click.argument("name")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--stat", is_flag=True, help="A line for each path.")
@click.option("--name-only", is_flag=True, help="The paths alone.")
@click.option("-z", "is_nul", is_flag=True, help="With --name-only: end each with NUL.")
@click.option("--binary", is_flag=True, help="Binary files in git's form.")
@freeze_option
@state_dir_option
@control_option
@json_option
def diff(name: str, patterns: Sequence[str], state_dir: str | None, **how: Any) -> int:
    """Print what was changed, as a patch that `git apply` takes.

    If PATTERN is the name of another workspace of the base, print what that has
    otherwise. Exit status: 0 nothing, 1 something, 2 a fault.
    """
    from supervisor.cli.workspace_target import (  # noqa: PLC0415
        NotThereError,
        find_daemon,
        show_notes,
    )
    from supervisor.workspace.verbs import diff_row, full_notes  # noqa: PLC0415

    daemon = find_daemon(state_dir, how.pop("control"))
    if daemon is not None:
        words = {"name": name, "patterns": patterns, "freeze": how["is_frozen"]}
        words["binary"] = how["binary"]
        with contextlib.suppress(NotThereError):
            rows = daemon.ask("diff", words)
            return print_diff(rows, daemon.patch(words), how)
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_open(state_dir, name))
        _stop(found, stack, is_asked=how["is_frozen"])
        if len(patterns) == 1 and _is_workspace(state_dir, patterns[0]):
            other = stack.enter_context(_open(state_dir, patterns[0]))
            rows = _call(found.compare_with, other)
            patch = found.patch_to(other, binary=how["binary"])
        else:
            chosen = _patterns(patterns)
            rows = _call(found.changes, chosen)
            patch = found.patch(chosen, binary=how["binary"])
        show_notes(full_notes(found))
        return print_diff([diff_row(row) for row in rows], patch, how)


def print_diff(
    rows: Sequence[dict[str, Any]], patch: Iterator[bytes], how: dict[str, Any]
) -> int:
    """Print changes as options say; return the exit status."""
    if how["as_json"]:
        _print_json(rows)
    elif how["name_only"] or how["stat"]:
        _print_names(rows, has_stat=how["stat"], is_nul=how["is_nul"])
    elif rows:
        _print_patch(patch)
    return CHANGED if rows else 0


@workspace.command(
    cls=Command, epilog="Example: sandhost workspace commit repo-1a2b3c src/ --dry-run"
)
@click.argument("name")
@commit_options
@journal_option
@state_dir_option
@control_option
@json_option
def commit(name: str, *, as_json: bool, **how: Any) -> int:
    """Bring changes to the base: all that is chosen, or nothing.

    Changes of a running child need --freeze and no snapshot below: commit a fork then.

    Exit status: 0 applied; 1 refused, for conflicts or guarded paths; 2 a fault.
    """
    asked = {"name": name, **commit_words(how)}
    return print_commit(_do(how, "commit", asked), as_json=as_json)


@workspace.command(cls=Command, epilog="Example: sandhost workspace discard x --yes")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@journal_option
@state_dir_option
@control_option
def discard(name: str, *, yes: bool, **where: Any) -> int:
    """Remove a workspace and all that was changed in it."""
    if not yes:
        try:
            changed = len(_do({**where, "journal": None}, "diff", {"name": name}))
        except CommandError:
            changed = -1  # its base cannot be read
        if not _is_confirmed(name, changed):
            return 1
    _do(where, "discard", {"name": name})
    return 0


def _is_confirmed(name: str, changed: int) -> bool:
    """Return whether a user agrees to lose changes; True without a terminal."""
    if not changed or sys.stdin is None or not sys.stdin.isatty():
        return True
    count = "all" if changed < 0 else changed
    question = f"discard {count} changes of workspace {name}?"
    return click.confirm(question, err=True)


@workspace.command(
    cls=Command, epilog="Example: sandhost workspace snapshot repo-1a2b3c before"
)
@click.argument("name")
@click.argument("label", required=False)
@journal_option
@state_dir_option
@control_option
def snapshot(name: str, label: str | None, **where: Any) -> int:
    """Keep what was changed so far under a label, and print that.

    A child's processes are stopped for the time of a copy.
    """
    words = {"name": name} if label is None else {"name": name, "label": label}
    done = _do(where, "snapshot", words)
    if done["copied_bytes"] or done["stopped_ns"]:
        text = f"{done['copied_bytes']} bytes copied"
        if done["stopped_ns"]:
            text += f", the child stopped for {done['stopped_ns'] / 1e6:.1f} ms"
        print(f"sandhost workspace: {name}: {text}", file=sys.stderr)
    print_text(f"{done['label']}\n")
    return 0


@workspace.command(
    cls=Command, epilog="Example: sandhost workspace restore repo-1a2b3c before --yes"
)
@click.argument("name")
@click.argument("label")
@click.option("--yes", is_flag=True, help="Do not ask.")
@journal_option
@state_dir_option
@control_option
def restore(name: str, label: str, *, yes: bool, **where: Any) -> int:
    """Go back to a snapshot; what was changed since is dropped."""
    words = {"name": name, "label": label}
    if not yes and sys.stdin is not None and sys.stdin.isatty():
        trial = {**words, "dry_run": True}
        asked = _do({**where, "journal": None}, "restore", trial)
        question = f"drop {asked['lost']} changes of workspace {name} since {label}?"
        if asked["lost"] and not click.confirm(question, err=True):
            return 1
    lost = _do(where, "restore", words)["lost"]
    if lost:
        text = f"{lost} changes since {label} were dropped"
        print(f"sandhost workspace: {name}: {text}", file=sys.stderr)
    return 0


@workspace.command(cls=Command, epilog="Example: sandhost workspace fork x -n 8")
@click.argument("name")
@click.option(
    "-n", "count", type=click.IntRange(1, 1000), default=1, help="How many; 1 if not."
)
@state_dir_option
@control_option
@json_option
def fork(name: str, count: int, *, as_json: bool, **where: Any) -> int:
    """Make workspaces that begin as this one is now, and print their names."""
    names = _do(where, "fork", {"name": name, "count": count})
    if as_json:
        _print_json(names)
        return 0
    for one in names:
        print_text(f"{one}\n")
    return 0


def _do(where: dict[str, Any], verb: str, words: dict[str, Any]) -> Any:
    """Do a verb on a daemon's workspace, or a state directory's; return its result.

    Args:
        where: the options ``state_dir`` and ``control``, and ``journal`` if the verb has
            that; a daemon writes its own.
        verb: of ``supervisor.workspace.verbs``.
        words: its arguments.
    """
    from supervisor.cli.workspace_options import find_state_dir  # noqa: PLC0415
    from supervisor.cli.workspace_target import (  # noqa: PLC0415
        NotThereError,
        find_daemon,
        show_notes,
    )
    from supervisor.workspace.verbs import VerbError, do_verb  # noqa: PLC0415

    journal = where.get("journal")
    daemon = find_daemon(where["state_dir"], where["control"])
    if daemon is not None and daemon.is_named and journal is not None:
        why = "the daemon has a journal of its own ('sandhost events'); leave it out"
        raise UsageFault(f"--journal: {why}")
    if daemon is not None:
        with contextlib.suppress(NotThereError):
            result = daemon.ask(verb, words)
            if journal is not None:
                show_notes([f"told by the daemon's own journal, not by {journal!r}"])
            return result
    with _open_journal(journal) as events:  # refused before anything is done
        try:
            done = do_verb(find_state_dir(where["state_dir"]), verb, words)
        except VerbError as why:
            raise CommandError(str(why)) from None
        if done.event is not None:
            event, counts = done.event
            events.write(event, workspace=words["name"], **counts)
    show_notes(done.notes)
    return done.result


@contextlib.contextmanager
def _open_journal(path: str | None) -> Iterator[Journal]:
    """Open a journal until the block ends; without a path it takes no event."""
    from hostlib.journal import open_journal  # noqa: PLC0415
    from supervisor.cli.workspace_target import show_notes  # noqa: PLC0415

    try:
        journal = open_journal(path, lambda text: show_notes([text]))
    except OSError as why:
        text = f"cannot open the journal {path!r}: {why.strerror}"
        raise CommandError(f"{text}; nothing changed: name another") from None
    with contextlib.closing(journal):
        yield journal


@workspace.command(
    cls=Command, epilog="Example: sandhost workspace export repo-1a2b3c work.patch"
)
@click.argument("name")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@state_dir_option
@control_option
def export(
    name: str, file: str, state_dir: str | None, control: str | None, *, force: bool
) -> int:
    """Write the changes to FILE: `.patch` for git, `.tar` as an OCI layer."""
    from supervisor.cli.workspace_target import NotThereError, find_daemon  # noqa: PLC0415
    from supervisor.workspace.export import form_of, write_whole  # noqa: PLC0415

    daemon = find_daemon(state_dir, control)
    if daemon is not None:
        form = _call(form_of, file)
        with contextlib.suppress(NotThereError), contextlib.ExitStack() as stack:
            pieces = daemon.export(name, form)
            whole = write_whole(file, replaces=force)
            _call(stack.enter_context, whole).writelines(pieces)
            _call(stack.close)
            return 0
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_open(state_dir, name))
        _stop(found, stack, is_asked=False)
        _call(lambda: found.export(file, replaces=force))
    return 0


def _open(state_dir: str | None, name: str) -> Workspace:
    from supervisor.cli.workspace_options import find_state_dir  # noqa: PLC0415
    from supervisor.cli.workspace_target import show_notes  # noqa: PLC0415
    from supervisor.workspace.verbs import end_cut  # noqa: PLC0415
    from supervisor.workspace.workspace import Workspace  # noqa: PLC0415

    found: Workspace = _call(lambda: Workspace(find_state_dir(state_dir), name))
    show_notes(_call(end_cut, found))
    return found


def _stop(found: Workspace, stack: contextlib.ExitStack, *, is_asked: bool) -> None:
    """Stop the child of a workspace until a stack ends, if asked; else warn."""
    from supervisor.cli.workspace_target import show_notes  # noqa: PLC0415
    from supervisor.workspace.verbs import stop_or_note  # noqa: PLC0415

    notes: list[str] = []
    _call(stack.enter_context, stop_or_note(found, notes, is_asked=is_asked))
    show_notes(notes)


def _call(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; its failure is one line for a user."""
    from supervisor.workspace.verbs import VerbError, word_errors  # noqa: PLC0415

    try:
        with word_errors():
            return call(*arguments)
    except VerbError as why:
        raise CommandError(str(why)) from None


def _is_workspace(state_dir: str | None, text: str) -> bool:
    """Return whether a word is the name of a workspace; as a pattern write `/NAME`."""
    from supervisor.cli.workspace_options import find_state_dir  # noqa: PLC0415
    from supervisor.workspace.directory import workspaces_in  # noqa: PLC0415

    return text in workspaces_in(find_state_dir(state_dir))


def _patterns(texts: Sequence[str]) -> Patterns:
    from supervisor.workspace.selection import Patterns  # noqa: PLC0415

    found: Patterns = _call(Patterns, texts)
    return found


def _print_json(value: object) -> None:
    import msgspec  # noqa: PLC0415

    print_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _print_names(
    rows: Sequence[dict[str, Any]], *, has_stat: bool, is_nul: bool
) -> None:
    from supervisor.workspace.verbs import path_in  # noqa: PLC0415

    end = b"\0" if is_nul else b"\n"
    for row in rows:
        path = path_in(row)
        if not is_nul:
            path = _escape(path)
        if has_stat:
            change, old = row["change"].encode(), row.get("old_size", 0)
            path = b"%-8s %8d -> %8d  %s" % (change, old, row["size"], path)
        print_bytes(path + end)


def _escape(path: bytes) -> bytes:
    """Return a path for one line of text: control bytes are made visible.

    On a terminal all that it might obey is escaped, elsewhere only ASCII controls.
    """
    line = b"".join(
        bytes((byte,)) if byte >= 0x20 and byte != 0x7F else b"\\x%02x" % byte
        for byte in path
    )
    if sys.stdout.isatty():
        return show_controls(line.decode("utf-8", "backslashreplace")).encode()
    return line


def _print_patch(pieces: Iterator[bytes]) -> None:
    from supervisor.workspace.terminal_patch import show_patch  # noqa: PLC0415

    if sys.stdout.isatty():
        pieces = show_patch(pieces, coloured="NO_COLOR" not in os.environ)
    while (data := _call(next, pieces, None)) is not None:
        print_bytes(data)


def print_commit(result: dict[str, Any], *, as_json: bool) -> int:
    """Print the result of a commit; return the exit status."""
    from supervisor.workspace.verbs import path_in  # noqa: PLC0415

    refused = result["conflicts"] or result["guarded"]
    status = REFUSED if refused and not result["applied"] else 0
    hidden = result.pop("hidden")
    if as_json:
        _print_json(result)
        return status
    merged = result.get("merged", ())  # absent in the answer of an older daemon
    for path in result["applied"]:
        word = b"merged     " if path in merged else b"committed  "
        print_bytes(word + _escape(path_in(path)) + b"\n")
    for one in result["conflicts"]:
        shown = _escape(path_in(one))
        print_bytes(b"conflict   " + shown + b": " + one["reason"].encode() + b"\n")
    for path in result["guarded"]:
        how = b"name it with --allow"
        if path in hidden:
            how = b"it is hidden and stays as it is; leave this with --except"
        print_bytes(b"guarded    " + _escape(path_in(path)) + b": " + how + b"\n")
    if status:
        print_text("nothing was committed\n")
    return status
