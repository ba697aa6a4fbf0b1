"""The ledger of a node: its id, its slices, the launchpad of the last session."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from supervisor.fleet.held_slices import HeldRow, LedgerRow
from supervisor.fleet.step import Change
from supervisor.membership.session_launchpad import LaunchpadRow

if TYPE_CHECKING:
    from supervisor.fleet.step import Store

LEDGER, HELD, LAUNCHPAD = "ledger", "held", "launchpad"
"""Its tables; the first two are written by `HeldSlices`."""

_ID_BYTES = 8


@dataclass(slots=True)
class NodeLedger:
    """The content of a ledger, as it was read.

    Attributes:
        row: the ledger's own.
        held: slices of sessions before.
        launchpad: of the last session; None if there was none.
        changes: to be stored at first.
    """

    row: LedgerRow
    held: list[HeldRow] = field(default_factory=list)
    launchpad: LaunchpadRow | None = None
    changes: list[Change] = field(default_factory=list)


def read_ledger(store: Store) -> NodeLedger:
    """Return what a store holds; a new id if it has none (spec FL7).

    Raises:
        msgspec.DecodeError: it is another program's.
    """
    ledger = NodeLedger(LedgerRow(""))
    for table, _, row in store.load():
        if table == LEDGER:
            ledger.row = msgspec.msgpack.decode(row, type=LedgerRow)
        elif table == HELD:
            ledger.held.append(msgspec.msgpack.decode(row, type=HeldRow))
        elif table == LAUNCHPAD:
            ledger.launchpad = msgspec.msgpack.decode(row, type=LaunchpadRow)
    if not ledger.row.id:
        ledger.row = LedgerRow(os.urandom(_ID_BYTES).hex())
        ledger.changes.append(Change(LEDGER, "", ledger.row))
    return ledger
