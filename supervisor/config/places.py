"""Roots, grants and workspaces: whether they exist, and which lie in which.

The checks that look at the file system, over all policies.

Rules of this file.

1. Paths are compared by device and inode of a directory and of all above it: two texts
   can name one directory, by links, by ``..``, or by a second mount of it (one of a
   directory beneath it hides its parents).
2. A path that does not exist yet (a daemon makes its directories) is compared by the
   part that exists and the names that follow.
"""

from __future__ import annotations

import contextlib
import errno
import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hostlib.messages import remedy
from hostlib.paths import absolute
from hostlib.user_values import join_key
from supervisor.config.directories import places_of
from supervisor.config.read import directory_fault
from supervisor.spawn.request import SpawnError, find_executable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from supervisor.config.directories import Places
    from supervisor.config.document import Config
    from supervisor.config.host import HostSection
    from supervisor.config.policy import PolicySection

GRANTS = ("read", "write")

BASE = "base"
"""The right of a workspace: its children see all that lies in it."""

_WRITTEN = ("root", "write", "home")
"""The keys of a policy whose paths its children may write."""

_BY_CALLS = ("home", "expose")
"""The keys of a policy whose paths its children reach by system calls."""

_ENDS = ("", ".", "..")
"""The last parts of names that only directories have."""

_KEY_WITHIN = (
    "'{}' lies in '{}', where children or their tools may read or replace it; choose"
    " another directory"
)


class ConfiguredPlace(NamedTuple):
    """The place of a path.

    Attributes:
        path: as shown.
        identities: identifies it and each directory above it, itself first (rules 1
            and 2).
    """

    path: str
    identities: tuple[tuple[object, ...], ...]

    def lies_in(self, other: ConfiguredPlace) -> bool:
        """Return whether it is beneath another one; the same one is not."""
        return other.identities[0] in self.identities[1:]

    def is_same(self, other: ConfiguredPlace) -> bool:
        """Return whether both are the same."""
        return self.identities[0] == other.identities[0]


def place_of(path: str) -> ConfiguredPlace:
    """Return the place of a path.

    Raises:
        OSError: a directory above it is hidden from this user, links form a ring, or
            its working directory is gone.
    """
    try:
        real = Path(path).resolve()
    except RuntimeError:  # until Python 3.12: a ring of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
    identities: list[tuple[object, ...]] = []
    missing: list[str] = []
    for here in (real, *real.parents):
        try:
            status = here.stat()
        except (FileNotFoundError, NotADirectoryError):
            missing.insert(0, here.name)
            continue
        if not identities:
            top = (status.st_dev, status.st_ino)
            identities += ((*top, *missing[:n]) for n in range(len(missing), 0, -1))
        identities.append((status.st_dev, status.st_ino))
    return ConfiguredPlace(str(Path(path).absolute()), tuple(identities))


def _grant_fault(path: str, *, is_written: bool) -> str:
    """Return why a grant cannot be held; "" also for a text that is no path.

    It is held for a moment, as a start does: other checks find other things
    (``pathlib`` drops the end of ``file/``, and the last link of a ring).
    """
    if not path or "\0" in path:
        return ""
    from supervisor.spec import not_held  # noqa: PLC0415 - for a policy that has grants
    from vfs.errors import AccessDeniedError  # noqa: PLC0415 - as above
    from vfs.places import close_places, open_place  # noqa: PLC0415 - as above

    try:
        close_places((open_place(path, write=is_written),))
    except (OSError, AccessDeniedError) as error:
        why = not_held(path, error)
    else:
        return ""
    if why.errno != errno.ENOENT:
        return f"cannot use {path!r}: {why.strerror}{remedy(why)}"
    if os.path.islink(path):  # noqa: PTH114 - as it is
        return f"{path!r} is a link that leads nowhere; mend it, or make what it names"
    what = "directory " if os.path.basename(path) in _ENDS else ""  # noqa: PTH119 - as it is
    return f"there is no {what}{path!r}; make it first"


def check_grants(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each grant that cannot be held."""
    for name, policy in config.policy.items():
        where = f"policy.{join_key(name)}"
        for key in GRANTS:
            for path in getattr(policy, key):
                # A path to be read and written is held once, for both.
                if why := _grant_fault(path, is_written=path in policy.write):
                    yield f"{where}.{key}", why


def check_exposed(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each path that cannot be shown to a child."""
    for name, policy in config.policy.items():
        if not policy.expose:
            continue
        from supervisor.sandbox.exposed_paths import fault_of  # noqa: PLC0415 - with one

        for path in filter(_is_possible, policy.expose):
            if why := fault_of(path):
                yield f"policy.{join_key(name)}.expose", why


def _is_possible(path: str) -> bool:
    return bool(path) and "\0" not in path  # else it is reported as no path


def check_workspaces(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each workspace that is no directory."""
    for name, sidecar in config.sidecar.items():
        path = sidecar.workspace
        if path is None or not path.startswith("/") or "\0" in path:
            continue  # an impossible path is reported elsewhere
        if why := directory_fault(path):
            yield f"sidecar.{join_key(name)}.workspace", why


def check_roots(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each root that is no directory, or lies in another one."""
    roots: list[tuple[str, ConfiguredPlace]] = []
    for name, policy in config.policy.items():
        if policy.root is None:
            continue
        where = f"policy.{join_key(name)}.root"
        if why := directory_fault(policy.root):
            yield where, why
            continue
        if not os.access(policy.root, os.X_OK, effective_ids=True):
            yield where, f"cannot use {policy.root!r}: this user may not enter it"
            continue
        try:
            root = place_of(policy.root)
        except OSError as error:  # a directory above it is hidden from this user
            yield where, f"cannot use {policy.root!r}: {error.strerror}"
            continue
        for owner, other in roots:
            if why := nesting_fault(root, other, owner):
                yield where, why
        roots.append((name, root))


def check_bases(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each base that is unusable, or lies in another one."""
    seen: list[tuple[str, ConfiguredPlace]] = []
    for name, section in config.workspace.items():
        key = f"workspace.{join_key(name)}.base"
        reasons = list(islice(_faults_of_base(section.base), 1))
        yield from ((key, reason) for reason in reasons)
        if reasons:
            continue
        try:
            place = place_of(section.base)
        except OSError as error:
            yield key, f"cannot use {section.base!r}: {error.strerror}"
            continue
        for owner, other in seen:
            if place.lies_in(other) or other.lies_in(place):
                both = (
                    f"'{place.path}' and the base '{other.path}' of workspace {owner!r}"
                )
                yield key, f"{both} lie in one another; name the outer one alone"
        seen.append((name, place))
    yield from _check_repeated(config, dict(seen))


def _check_repeated(
    config: Config, places: Mapping[str, ConfiguredPlace]
) -> Iterator[tuple[str, str]]:
    for policy_name, policy in config.policy.items():
        used = [(name, places[name]) for name in policy.workspace if name in places]
        for index, (name, place) in enumerate(used):
            for other, before in used[:index]:
                if other != name and place.is_same(before):
                    key = f"policy.{join_key(policy_name)}.workspace"
                    why = f"{name!r} and {other!r} have one base"
                    yield key, f"{why}, which a child sees once; leave one out"


def _faults_of_base(base: str) -> Iterator[str]:
    if not base.startswith("/"):
        yield f"{base!r} depends on where the host is started; write an absolute path"
    if why := directory_fault(base):
        yield why
        return
    status = os.stat(base)  # noqa: PTH116 - as the others
    if os.path.samestat(status, os.stat("/")):  # noqa: PTH116 - of the top
        yield f"{base!r} is the top of the file system; name a directory in it"
    if os.geteuid() not in {0, status.st_uid}:
        yield f"user {status.st_uid} owns {base!r}; name a directory of user {os.geteuid()}"


def nesting_fault(root: ConfiguredPlace, other: ConfiguredPlace, owner: str) -> str:
    """Return why a root cannot be beside a policy's: one lies in the other."""
    if not (root.lies_in(other) or other.lies_in(root)):
        return ""
    return (
        f"'{root.path}' and the root '{other.path}' of policy {owner!r} lie in one"
        " another: one child would reach into the other's; choose another one"
    )


def check_nesting(config: Config, name: str, path: str) -> Iterator[str]:
    """Yield why a root cannot be used beside those of other policies.

    Args:
        config: checked.
        name: the policy of the root; its own root is ignored.
        path: an existing directory.

    Raises:
        OSError: a directory above it is hidden from this user.
    """
    root = place_of(path)
    for owner, other in _roots(config):
        if owner != name and (why := nesting_fault(root, other, owner)):
            yield why


def odd_places(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of places of two policies, or of none: a probable mistake."""
    seen: list[tuple[str, ConfiguredPlace]] = []
    roots = list(_roots(config))
    for name, root in roots:
        for owner, other in seen:
            if root.is_same(other):
                yield f"policy.{join_key(name)}.root", _place_phrase(root, other, owner)
        seen.append((name, root))
    for name, policy in config.policy.items():
        others = [(owner, root) for owner, root in roots if owner != name]
        for text in (
            *_files_to_be_made(policy.write),
            *_reaching(others, policy.write),
        ):
            yield f"policy.{join_key(name)}.write", text
        for text in _reaching(others, [policy.home or ""]):
            yield f"policy.{join_key(name)}.home", text


def _files_to_be_made(paths: Iterable[str]) -> Iterator[str]:
    """Yield warnings about grants of a file that the child may make.

    A directory with a misspelt name is one, and hides all beneath it.
    """
    for path in paths:
        if not os.path.exists(path):  # noqa: PTH110 - as it is
            yield (
                f"there is no {path!r}: the grant is for a file of that name, which the"
                " child may make; make the directory first if it is to be one"
            )


def reaching_roots(config: Config, name: str, paths: Iterable[str]) -> Iterator[str]:
    """Yield warnings about written paths that reach another policy's root.

    Args:
        config: checked.
        name: the policy of the paths; its own root is ignored.
        paths: a root or grants to write.
    """
    yield from _reaching([(o, root) for o, root in _roots(config) if o != name], paths)


def _reaching(
    roots: list[tuple[str, ConfiguredPlace]], paths: Iterable[str]
) -> Iterator[str]:
    for path in filter(None, paths) if roots else ():
        try:
            place = place_of(path)
        except (OSError, ValueError):
            continue  # the start reports it
        for owner, root in roots:
            if place.is_same(root) or place.lies_in(root) or root.lies_in(place):
                yield _place_phrase(place, root, owner)


def _roots(config: Config) -> Iterator[tuple[str, ConfiguredPlace]]:
    """Yield the policies that have a root, with its place."""
    for name, policy in config.policy.items():
        if policy.root:
            # Removed by now, which its start reports.
            with contextlib.suppress(OSError):
                yield name, place_of(policy.root)


def _place_phrase(place: ConfiguredPlace, root: ConfiguredPlace, owner: str) -> str:
    """Return the text that a place is, holds or lies in a root."""
    if place.is_same(root):
        relation = "is"
    else:
        relation = "lies in" if place.lies_in(root) else "holds"
    return (
        f"'{place.path}' {relation} the root '{root.path}' of policy {owner!r}: its"
        f" children can change what policy {owner}'s children have; choose another one"
        " if that is not meant"
    )


def odd_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of key files that lie where children or tools may write."""
    from hostlib.keys import (  # noqa: PLC0415 - ctypes
        NoCredentialsError,
        expand_path,
    )

    directories = config.places_written() | {
        child.cwd for child in config.child.values() if child.cwd
    }
    for key, file in config.key_files():
        with contextlib.suppress(OSError, ValueError, NoCredentialsError):
            place = place_of(expand_path(file))
            within = (d for d in sorted(directories) if place.lies_in(place_of(d)))
            if (directory := next(within, None)) is not None:
                yield key, _KEY_WITHIN.format(place.path, directory)


def odd_places_of_daemon(section: HostSection) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of paths that depend on the working directory of a start."""
    for key in ("runtime_dir", "state_dir", "control"):
        path = getattr(section, key)
        if path is not None and not path.startswith("/"):
            text = f"{path!r} depends on where the daemon is started; write an absolute path"
            yield f"host.{key}", text


def odd_programs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of programs that are missing, or that cannot be executed."""
    for key, program, path, cwd in _programs(config):
        if not program or "\0" in program:
            continue  # reported as a fault
        if cwd is None and "/" in program and not program.startswith("/"):
            continue  # the daemon's directory and its child's root are not known
        try:
            find_executable(program, path, cwd or "/")
        except SpawnError as why:
            yield key, why.text


def _programs(config: Config) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield (key, program, its PATH, its working directory if that is known)."""
    usual = os.environ.get("PATH") or os.defpath.lstrip(":")
    for name, child in config.child.items():
        cwd = None if child.cwd is None else absolute(child.cwd)
        path = child.env.get("PATH", usual)
        yield f"child.{join_key(name)}.command", _first(child.command), path, cwd
    for name, sidecar in config.sidecar.items():
        if sidecar.backend == "local" and sidecar.start is not None:
            path = ":".join((*sidecar.path, usual))
            key = f"sidecar.{join_key(name)}.start"
            yield key, _first(sidecar.start), path, sidecar.workspace
    if config.toolexec is not None and config.toolexec.notify is not None:
        command = config.toolexec.notify.command
        yield "toolexec.notify.command", _first(command), usual, None


def _first(words: Sequence[str]) -> str:
    return words[0] if words else ""


def check_own(
    config: Config, *, with_usual: bool = False, living: Places | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each root and grant that holds a daemon's own places.

    Those inside of one are refused as well: other children's roots, logs and journal.

    Args:
        config: the whole one.
        with_usual: whether the usual places of a daemon count as well.
        living: the places of a daemon; they count instead of the written ones.
    """
    own = list(_own_places(config.host, living, with_usual=with_usual))
    for name, policy in config.policy.items():
        for key, path in _policy_paths(policy):
            if why := _find_refusal(own, key, path):
                yield f"policy.{join_key(name)}.{key}", why
    for name, section in config.workspace.items():
        if why := _find_refusal(own, BASE, section.base):
            yield f"workspace.{join_key(name)}.{BASE}", why


def reaching_own(config: Config, key: str, paths: Iterable[str]) -> Iterator[str]:
    """Yield warnings about roots or grants of ``run`` that reach a daemon's places.

    Args:
        config: checked; its places count.
        key: ``root``, ``home``, ``read``, ``write`` or ``expose``.
        paths: the values of that key.
    """
    own = list(_own_places(config.host, None, with_usual=False))
    for path in filter(None, paths):
        if why := _find_refusal(own, key, path):
            yield why


def _find_refusal(own: Iterable[_Own], key: str, path: str) -> str:
    """Return why a root or grant is too much; "" if it reaches nothing of a daemon's."""
    try:
        place = place_of(path)
    except (OSError, ValueError):
        return ""  # reported as that
    return next((why for its in own if (why := its.refusal(place, key))), "")


def _policy_paths(policy: PolicySection) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of a policy's root, HOME, grants and exposed paths."""
    for key in ("root", "home"):
        if path := getattr(policy, key):
            yield key, path
    for key in (*GRANTS, "expose"):
        yield from ((key, path) for path in getattr(policy, key) if path)


class _Own(NamedTuple):
    """A place of a daemon.

    Attributes:
        what: its name for messages.
        place: where it is.
        loss: the damage that children with it could do.
        keys: the keys of a policy that may not reach it.
        is_whole: whether all beneath it is the daemon's, too.
    """

    what: str
    place: ConfiguredPlace
    loss: str
    keys: tuple[str, ...]
    is_whole: bool = True

    def refusal(self, place: ConfiguredPlace, key: str) -> str:
        """Return why a root or grant is too much, if it holds this one or lies in it."""
        if key not in self.keys and key != BASE:
            return ""
        if self.place.lies_in(place) or self.place.is_same(place):
            relation, how = "holds", "choose one that holds nothing of the daemon's"
        elif self.is_whole and place.lies_in(self.place):
            relation, how = "lies in", "choose one outside"
        else:
            return ""
        way = "in it" if key == BASE else "its" if key in _BY_CALLS else "by FD 3 its"
        return (
            f"'{place.path}' {relation} {self.what} ('{self.place.path}'): {way}"
            f" children could {self.loss}; {how}, or another place in [host]"
        )


def _own_places(
    section: HostSection, living: Places | None, *, with_usual: bool
) -> Iterator[_Own]:
    """Yield a daemon's own places; unreadable ones are reported by their maker."""
    try:
        places = living or places_of(section, None)
    except (OSError, ValueError):
        return
    has_all = living is not None
    files = "reach other children's files and the journal"
    beneath = (places.logs, places.journal, places.scratch, places.checkpoints)
    takes, writes = "take the daemon's lock and sockets away", _WRITTEN
    found: list[tuple[str, str, str, tuple[str, ...], bool]] = []
    if has_all or with_usual or section.state_dir:
        every = (*_WRITTEN, "read", "expose")
        found.append(("[host] state_dir", places.state_dir, files, every, False))
        what = "what [host] state_dir is for"
        found += [(what, path, files, every, True) for path in beneath]
        spends = "change what is left of the quota"
        found.append((what, places.ledger, spends, every, True))
        found.append((what, places.state_lock, takes, writes, True))
    if has_all or with_usual or section.runtime_dir:
        where = places.runtime_dir
        found.append(("[host] runtime_dir", where, takes, writes, True))
    if has_all or section.control:
        found.append(
            ("the daemon's control socket", places.control, takes, writes, True)
        )
    for what, path, loss, keys, is_whole in found:
        with contextlib.suppress(OSError, ValueError):
            yield _Own(what, place_of(path), loss, keys, is_whole)
