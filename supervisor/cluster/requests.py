"""Requests to an actor: a table of handlers, and one form of their outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from hostlib.log import place_of
from supervisor.fleet.messages import VersionError, check_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hostlib.log import Log

Reply: TypeAlias = tuple[bool | None, bytes]
"""Whether it was done, and the result as JSON, or why not as text; None instead of False
where the same may be asked again (`FleetUnavailableError`). Its form stays over versions: the
refusal of another version travels in it."""

Handler: TypeAlias = Callable[[bytes], Awaitable[object]]
"""Does a request; takes its arguments as JSON, and returns its result."""

T = TypeVar("T")


class RequestError(Exception):
    """A request cannot be done; the text says what, why and what to do."""


class FleetUnavailableError(RequestError):
    """A part of the fleet does not answer now; the same may be asked again."""


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of a request that takes none."""


class Requests:
    """The requests of one actor.

    Args:
        part: the actor, for texts.
        handlers: by request.
        refusals: the errors by which a handler refuses, beside `RequestError`.
        log: gets faults.
        transient: the errors beside `FleetUnavailableError` after which it may be asked
            again.
    """

    def __init__(
        self,
        part: str,
        handlers: Mapping[str, Handler],
        refusals: tuple[type[Exception], ...],
        log: Log,
        transient: tuple[type[Exception], ...] = (),
    ) -> None:
        self._actor = part
        self._handlers = handlers
        self._refusals: tuple[type[Exception], ...] = (
            RequestError,
            VersionError,
            msgspec.DecodeError,
            *refusals,
        )
        self._log = log
        self._transient: tuple[type[Exception], ...] = (
            FleetUnavailableError,
            *transient,
        )

    async def answer(self, version: str, do: str, args: bytes) -> Reply:
        """Do what another actor or a command asks, and return the outcome.

        Args:
            version: of the part that asks.
            do: the request.
            args: its arguments as JSON.
        """
        try:
            check_version("a node actor", version, refuser=self._actor)
            return True, msgspec.json.encode(await self._handler(do)(args))
        except self._transient as why:
            return None, str(why).encode()
        except self._refusals as why:
            return False, str(why).encode()
        except Exception as why:  # noqa: BLE001 - the actor outlives a request
            self._log.write("ERROR", f"Fault of {self._actor}: {place_of(why)}")
            text = f"{self._actor} has a fault: {type(why).__name__}; see its log"
            return False, text.encode()

    def _handler(self, do: str) -> Handler:
        handler = self._handlers.get(do)
        if handler is None:
            raise RequestError(f"cannot do {do!r}: {self._actor} does not know it")
        return handler


def result_of(reply: Reply) -> bytes:
    """Return the result of a request as JSON.

    Raises:
        FleetUnavailableError: the same may be asked again.
        RequestError: it was refused.
    """
    is_done, data = reply
    if is_done:
        return bytes(data)
    text = data.decode()
    raise FleetUnavailableError(text) if is_done is None else RequestError(text)


def read(args: bytes, kind: type[T]) -> T:
    """Return JSON as what it is to be.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    return msgspec.json.decode(args, type=kind)
