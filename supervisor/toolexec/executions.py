"""The executions of one child.

    admit (id, slot) -> Execution.spawn -> begin -> finished (log kept)

Rules of this file.

1. An execution belongs to one child: it runs in that child's nursery and ends with the
   child. Other children do not find it.
2. Finished output stays until the child ends, the oldest going first; for room on the
   disk the oldest file without a reader goes.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING

import msgspec
import trio

from hostlib.fairness import Share
from supervisor.toolexec import growth
from supervisor.toolexec.execution import Execution, ExecutionState
from supervisor.toolexec.output.log import OutputLog
from supervisor.toolexec.output.quota import LogQuota
from supervisor.toolexec.slots import BusyError, Slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts

END_TIMEOUT_S = 5.0
"""Longest wait for the executions of an ended child; they are killed at once, and only
a process that is stuck in the kernel takes longer."""

KEPT_EXECUTIONS = 32
"""Finished executions of one child whose output is kept; each takes up to 64 KiB of
memory, the rest is on the disk and within the quota."""

QUOTA_LIMITS = 2
"""Most logs at their limit that one child may have on the disk."""


class InUseError(Exception):
    """A live execution of the same child has this id; the text is the id."""


class ExecutionsState(msgspec.Struct):
    """The executions of a child, its token, its socket, and its share of the disk."""

    id: str
    token: str
    listener_fd: int
    path: bytes
    executions: list[ExecutionState]
    used_bytes: int
    spare: tuple[int, int] | None


class ChildExecutions:
    """The executions of one child.

    Args:
        host: has the child.
        child: the child.
        slots: of the host.
        log_dir: has the logs.
        log_limit_bytes: longest log.
        null_fd: the null device.

    Attributes:
        null_fd: as above.
        nursery: runs them; the child's.
        token: that of the child.
        listener: (descriptor, path) of its own socket; the path is empty for a port in
            its net namespace; None without a socket.
        live: the running ones, by scope and id.
        kept: the finished ones with output, oldest first.
        quota: of their logs on the disk.
        growth: charges the child for made files; None if there is no bound.
        bodies: the turn for decoding the child's requests.
        receiving: connections that receive a body for the child.
        lacks_doors: whether the log says that its tools have no way to the model.
    """

    def __init__(
        self,
        host: Parts,
        child: ChildView,
        slots: Slots,
        *,
        log_dir: str,
        log_limit_bytes: int,
        null_fd: int,
    ) -> None:
        self.host = host
        self.child = child
        self.null_fd = null_fd
        self.nursery: trio.Nursery | None = None
        self.token = ""
        self.listener: tuple[int, str] | None = None
        self.live: dict[str, Execution] = {}
        self.kept: OrderedDict[str, Execution] = OrderedDict()
        self.growth = growth.growth_of(child)
        self.bodies = Share()
        self.receiving = 0
        self.lacks_doors = False
        self._slots = slots
        self._log_dir = log_dir
        self._log_limit_bytes = log_limit_bytes
        limit_bytes = QUOTA_LIMITS * log_limit_bytes
        self.quota = LogQuota(
            limit_bytes, self._give_a_file_up, self._slots.descriptors
        )

    def admit(
        self,
        tool: str,
        exec_id: str | None = None,
        scope: str = "",
        *,
        keep_all: bool = False,
    ) -> Execution:
        """Return a new execution with an id and a slot.

        Args:
            tool: its name.
            exec_id: wanted; None for a fresh one.
            scope: of the token; ids are unique within one.
            keep_all: whether its output is needed whole, at its end.

        Raises:
            InUseError: a live execution has the id.
            BusyError: no slot is left.
        """
        exec_id = exec_id or secrets.token_hex(16)
        key = scope + exec_id
        if key in self.live:
            raise InUseError(exec_id)
        if self.nursery is None:
            raise BusyError  # the child is ending
        self._slots.take(len(self.live))
        earlier = self.kept.pop(key, None)
        if earlier is not None:
            earlier.log.discard()
        log = OutputLog(
            self._log_dir, self._log_limit_bytes, self.quota, keep_all=keep_all
        )
        execution = self.live[key] = Execution(self, exec_id, tool, log)
        execution.key = key
        return execution

    def busy(self) -> str | None:
        """Return what must end before they can be handed over."""
        if self.nursery is None:
            return f"the tools of {self.child.id} are being ended"
        for execution in self.live.values():
            if not execution.has_begun:
                return f"tool {execution.tool!r} is being started"
        return None

    def snapshot(self) -> tuple[ExecutionsState, set[int]]:
        """Return their state for ``restore``, without executions; and descriptors."""
        listener_fd, path = self.listener or (-1, "")
        quota = self.quota
        state = ExecutionsState(
            id=self.child.id,
            token=self.token,
            listener_fd=listener_fd,
            path=os.fsencode(path),
            executions=[],
            used_bytes=quota.used_bytes,
            spare=quota.spare,
        )
        return state, {listener_fd, *quota.descriptors()}

    def restore(self, state: ExecutionsState) -> list[Execution]:
        """Restore the state of the program before; return its executions in order.

        They stay at rest until ``resume``.
        """
        self.quota.restore(state.used_bytes, state.spare)
        return [self._restore_execution(one) for one in state.executions]

    def _restore_execution(self, state: ExecutionState) -> Execution:
        log = OutputLog(
            self._log_dir,
            self._log_limit_bytes,
            self.quota,
            keep_all=state.log.keep_all,
        )
        log.restore(state.log)
        self._slots.descriptors.hold(len(log.descriptors()))
        execution = Execution(self, state.id, os.fsdecode(state.tool), log)
        execution.restore(state)
        if execution.process is not None:
            self.live[state.key] = execution
            self._slots.enter()
        elif state.where == "kept":
            self.kept[state.key] = execution
        return execution

    def resume(self) -> None:
        """Run the executions of the program before."""
        for execution in self.live.values():
            if self.nursery is not None:
                left_s = execution.timeout_at - trio.current_time()
                limit_s = 0.0 if left_s == inf else max(0.001, left_s)
                execution.run(self.nursery, limit_s)

    def release(self, execution: Execution, *, keep: bool) -> None:
        """Free the id and the slot; keep the output if ``keep`` is true."""
        del self.live[execution.key]
        self._slots.give()
        if not keep:
            execution.log.discard()
            return
        self.kept[execution.key] = execution
        while len(self.kept) > KEPT_EXECUTIONS:
            self._give_one_up()

    def find(self, exec_id: str, scope: str) -> Execution | None:
        """Return an execution with output; None if there is none."""
        return self.find_live(exec_id, scope) or self.kept.get(scope + exec_id)

    def find_live(self, exec_id: str, scope: str) -> Execution | None:
        """Return an unfinished execution; None if there is none."""
        return self.live.get(scope + exec_id)

    def _give_one_up(self) -> bool:
        if not self.kept:
            return False
        self.kept.popitem(last=False)[1].log.discard()
        return True

    def _give_a_file_up(self) -> bool:
        for key, execution in self.kept.items():
            if execution.log.has_idle_file:
                del self.kept[key]
                execution.log.discard()
                return True
        return False

    async def close(self) -> None:
        """End every execution and free all output: the child has ended."""
        nursery, self.nursery = self.nursery, None
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            async with trio.open_nursery() as ending:
                for execution in tuple(self.live.values()):
                    ending.start_soon(execution.end_now)
        if nursery is not None:
            nursery.cancel_scope.cancel()
        while self._give_one_up() or self.quota.drop_spare():
            pass

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield their descriptors of the host."""
        for execution in (*self.live.values(), *self.kept.values()):
            yield from execution.descriptors()
        for fd in self.quota.descriptors():
            yield fd, "spare output log"
