"""Routes and sockets that a running child gets in its net namespace.

Rule: a process of its own makes them, for what enters a namespace stays in it. It is in no
pid namespace of the child, which may not look at it either, and it ends at once. It takes
about a millisecond.
"""

from __future__ import annotations

import errno
import os

from supervisor.spawn.launchpad.layers import loopback, namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.spawn.launchpad.layers.loopback import LoopbackOrder


def add(order: LoopbackOrder, net: int, way: int, users: Sequence[int]) -> None:
    """Make what an order says in the namespace of a child.

    Args:
        order: addresses that are there already are no fault.
        net: the net namespace.
        way: of a socket that the host receives from.
        users: the user namespace that owns it, where that is another one than this
            process's.

    Raises:
        OSError: it cannot be entered, or not all can be made.
    """
    pid = os.fork()
    if pid == 0:
        number = errno.EIO
        try:
            for space in users:
                namespaces.join_user(space)
            namespaces.join_net(net)
            loopback.furnish(order, way)
            number = 0
        except OSError as error:
            number = error.errno or errno.EIO
        finally:
            os._exit(number)
    _, status = os.waitpid(pid, 0)
    number = os.waitstatus_to_exitcode(status)
    if number:
        number = max(number, 0) or errno.EIO
        raise OSError(number, os.strerror(number))
