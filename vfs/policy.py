"""The rights of a client, and their narrowing.

Rules of this file.

1. Rights belong to a connection and are fixed when it is made (spec A1).  The only later
   change is ``narrow``, which removes rights (spec A5, I8).
2. A name is looked up in the places (``places``) with the wanted right, nearest first;
   relative names never reach grants (spec A3).
3. A place that lies in another one has the rights of both: a file that is readable by one
   grant and writable by another is both.

``ledger`` has the limits that are counted.
"""

from __future__ import annotations

import contextlib
import math
import os
from binascii import Error as Base64Error
from binascii import a2b_base64
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec

from vfs.backends import HostDirectory
from vfs.errors import AccessDeniedError, RightsError, UnavailableError
from vfs.places import Place, close_places, open_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vfs.ledger import Ledger


class UseState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rights of a policy beside its places; see ``Policy``."""

    image_tokens: int | None = None
    model: str | None = None
    quota: float | None = None
    tools: frozenset[str] | None = None


class PolicyState(msgspec.Struct):
    """A policy; its places are numbers, as in ``handover.Numbering``.

    Attributes:
        cwd_fd: the start of relative names in the top-level view.
        more: its rights beside places.
    """

    top_level: bool
    cwd_fd: int
    places: list[int]
    root: int | None
    more: UseState = UseState()


class Policy:
    """All rights of a client.

    Args:
        top_level: the client may use the top-level view (spec A1).
        cwd_fd: the start of relative names in the top-level view; owned by the caller.
        places: the root first, then the grants; owned by their maker.
        root: the place whose path must still name it at each use (spec O4); by default
            the first place.
        tools: the tools that may be run for it; None for those of every sidecar.
        model: the model of the client's own right; None for the host's.
        quota: weighted tokens that the last narrowing left; None if it set none.
        image_tokens: tokens reserved for each part of a prompt that is not text; None
            for the default.

    Attributes:
        is_distant: one of the places may wait for another machine or process.
    """

    __slots__ = (
        "host",
        "image_tokens",
        "is_distant",
        "model",
        "places",
        "quota",
        "root",
        "tools",
        "top_level",
    )

    def __init__(  # noqa: PLR0913 - everything that a client may do
        self,
        places: tuple[Place, ...],
        *,
        top_level: bool = False,
        cwd_fd: int = -1,
        root: Place | None = None,
        tools: frozenset[str] | None = None,
        model: str | None = None,
        quota: float | None = None,
        image_tokens: int | None = None,
    ) -> None:
        self.top_level = top_level
        self.tools = tools
        self.host = HostDirectory(cwd_fd, beneath=False)
        self.places = places
        self.model = model
        self.quota = quota
        self.image_tokens = image_tokens
        self.root = root if root is not None else places[0] if places else None
        self.is_distant = any(place.is_distant for place in places)
        _share_rights(places)

    def snapshot(self, number: Callable[[Place], int]) -> PolicyState:
        """Return the policy for the next program.

        Args:
            number: returns the number of a place.

        Raises:
            HandoverError: a place is no directory of the host.
        """
        return PolicyState(
            top_level=self.top_level,
            cwd_fd=self.host.dir_fd,
            places=[number(place) for place in self.places],
            root=None if self.root is None else number(self.root),
            more=UseState(
                image_tokens=self.image_tokens,
                model=self.model,
                quota=self.quota,
                tools=self.tools,
            ),
        )

    @classmethod
    def restore(cls, state: PolicyState, places: Sequence[Place]) -> Self:
        """Return the policy of the program before.

        Args:
            state: the policy.
            places: all places, by their numbers.
        """
        policy = cls(
            (),
            top_level=state.top_level,
            cwd_fd=state.cwd_fd,
            root=None if state.root is None else places[state.root],
            tools=state.more.tools,
            model=state.more.model,
            quota=state.more.quota,
            image_tokens=state.more.image_tokens,
        )
        # Not by the constructor: places in one another have shared their rights already.
        policy.places = tuple(places[number] for number in state.places)
        policy.is_distant = any(place.is_distant for place in policy.places)
        return policy

    @property
    def has_root(self) -> bool:
        """Whether the whole root is left, with its rights (spec A5)."""
        root = self.root
        return root is None or any(
            place.identity == root.identity
            and place.only is None
            and (place.read or not root.read)
            and (place.write or not root.write)
            for place in self.places
        )

    def check_available(self) -> None:
        """Raise ``UnavailableError`` if the root is gone or was replaced (spec O4)."""
        root = self.root
        if root is None or root.is_lasting or not root.prefixes:
            return
        try:
            status = os.stat(root.prefixes[0])
        except OSError:
            raise UnavailableError from None
        if (status.st_dev, status.st_ino) != root.identity:
            raise UnavailableError

    def is_claimed(self, claim: bool) -> bool:
        """Return whether a request is for the top-level view.

        Args:
            claim: the request asks for it.

        Raises:
            UnavailableError: the request is for the root, which is gone (spec O4).
            AccessDeniedError: the request claims a right that the client does not have
                (spec A1).
        """
        if claim and self.top_level:
            return True
        self.check_available()
        if claim:
            raise AccessDeniedError
        return False

    def candidates(
        self, name: bytes, *, read: bool, write: bool
    ) -> list[tuple[Place, bytes]]:
        """Return (place, rest of the name) of every place to try, nearest first.

        Raises:
            AccessDeniedError: no place covers the name with these rights (spec A3).
        """
        found = []
        for place in self.places:
            if (read and not place.read) or (write and not place.write):
                continue
            rest = place.beneath(name)
            if rest is not None:
                found.append((place, rest))
        if not found:
            raise AccessDeniedError
        if len(found) > 1:
            found.sort(key=lambda pair: len(pair[1]))
        return found

    def narrow(
        self,
        document: bytes,
        ledger: Ledger | None = None,
        models: frozenset[str] | None = None,
        room: float | None = None,
    ) -> Policy:
        """Return a policy with at most these rights (spec A5).

        Args:
            document: JSON ``{"read": [...], "write": [...], "tools": [...]}``; the names
                (or ``CodedName``) become the only places, the tools the only tools; an
                empty document only drops the top-level right.  ``model`` and ``quota``
                narrow the use of the model.
            ledger: charged an open file for each new place, which is held open (attack
                18); the code that closes the places gives them back.
            models: the host's models; None if the host has no model.
            room: number of places for which the host has descriptors; None for any.

        Raises:
            RightsError: the document has another form, or names a right that this policy
                does not have.
        """
        wanted = _parse(document, models)
        tools = self._narrow_tools(wanted.tools)
        # Without the top-level right the model of that right is gone, too.
        model = wanted.model or (None if self.top_level else self.model)
        make = partial(
            Policy,
            root=self.root,
            tools=tools,
            model=model,
            quota=wanted.quota,
            image_tokens=self.image_tokens,
        )
        if wanted.read is None and wanted.write is None:
            return make(self.places)
        rights: dict[bytes, list[bool]] = {}
        for index, names in enumerate((wanted.read, wanted.write)):
            for name in names or ():
                rights.setdefault(_bytes_of(name), [False, False])[index] = True
        _charge(len(rights), ledger, room)
        places: list[Place] = []
        try:
            for raw, (read, write) in rights.items():
                places.append(self._part(raw, read=read, write=write))
        except BaseException:
            close_places(places)
            if ledger is not None:
                ledger.open_files.charge(-len(rights))
            raise
        return make(tuple(places))

    def _narrow_tools(self, wanted: list[str] | None) -> frozenset[str] | None:
        if wanted is None:
            return self.tools
        if self.tools is not None and not self.tools.issuperset(wanted):
            more = sorted(set(wanted) - self.tools)
            raise RightsError(f"not among this client's tools: {more[0]!r}")
        return frozenset(wanted)

    def _part(self, name: bytes, *, read: bool, write: bool) -> Place:
        if not name:
            raise RightsError("an empty name")
        text = os.fsdecode(name)
        try:
            if self.top_level and name.startswith(b"/"):
                return open_place(name, read=read, write=write)
            return self._part_of_places(name, read=read, write=write)
        except AccessDeniedError:
            raise RightsError(f"not within this client's rights: {text!r}") from None
        except OSError as why:
            reason = os.strerror(why.errno or 0)
            raise RightsError(f"cannot narrow to {text!r}: {reason}") from None

    def _part_of_places(self, name: bytes, *, read: bool, write: bool) -> Place:
        for place, rest in self.candidates(name, read=read, write=write):
            with contextlib.suppress(AccessDeniedError):  # another place may hold it
                return place.part(rest, read=read, write=write)
        raise AccessDeniedError


def _charge(names: int, ledger: Ledger | None, room: float | None) -> None:
    if room is not None and names > room:
        raise RightsError("too many names: the host has no descriptors for them")
    if ledger is not None and not ledger.open_files.charge(names):
        raise RightsError("too many names: each takes the place of an open file")


def names_in(document: bytes) -> list[bytes]:
    """Return the names of places in a document of rights.

    Raises:
        RightsError: the document has another form.
    """
    wanted = _decode(document)
    return [_bytes_of(name) for name in (*(wanted.read or ()), *(wanted.write or ()))]


def network_in(document: bytes) -> list[str] | None:
    """Return the network rules in a document of rights; None if it is not about them.

    Raises:
        RightsError: the document has another form.
    """
    return _decode(document).network


def _decode(document: bytes) -> Rights:
    try:
        return msgspec.json.decode(document, type=Rights)
    except ValueError as why:
        raise RightsError(str(why)) from None


def _parse(document: bytes, models: frozenset[str] | None) -> Rights:
    wanted = _decode(document)
    if wanted.model is None and wanted.quota is None:
        return wanted
    if models is None:
        raise RightsError("this host has no model, and so no quota")
    if wanted.model is not None and wanted.model not in models:
        raise RightsError(f"not within this client's rights: model {wanted.model!r}")
    if wanted.quota is not None and not 0 <= wanted.quota < math.inf:
        raise RightsError("quota: weighted tokens, from 0 on")
    return wanted


def _bytes_of(name: str | CodedName) -> bytes:
    if isinstance(name, str):
        return name.encode()
    try:
        return a2b_base64(name.name_b64, strict_mode=True)
    except (Base64Error, ValueError):
        raise RightsError(f"no base64: {name.name_b64!r}") from None


def _share_rights(places: tuple[Place, ...]) -> None:
    """Add to each place the rights of the places in which it lies."""
    by_text = {text: place for place in places for text in place.prefixes}
    for place in places:
        for text in place.prefixes:
            above = text
            while above != b"/" and not (place.read and place.write):
                above = os.path.dirname(above)
                outer = by_text.get(above)
                if outer is None or outer.only is not None:
                    continue
                more = (outer.read and not place.read) or (
                    outer.write and not place.write
                )
                rest = outer.beneath(text)
                if more and rest is not None and outer.holds(place, rest):
                    place.read |= outer.read
                    place.write |= outer.write


class CodedName(msgspec.Struct, forbid_unknown_fields=True):
    """A name that is not UTF-8, in a JSON document (spec X1)."""

    name_b64: str


class Rights(msgspec.Struct, forbid_unknown_fields=True):
    """The document of ``NARROW``."""

    read: list[str | CodedName] | None = None
    write: list[str | CodedName] | None = None
    model: str | None = None
    quota: float | None = None
    tools: list[str] | None = None
    network: list[str] | None = None
