"""The table of handlers by request class.

Rules of the handlers (``handlers.files``, ``handlers.names``, ``handlers.connection``).

1. A handler looks up, checks, acts, and returns the whole reply; or it passes the rest
   to the session (``collect``, ``drain``, ``start``) and returns None.
2. Checks run in the contract's order; a payload is always taken off the line before an
   error is answered (spec W4).
3. No reply holds text of a peer, a file name or the system that ``echo`` has not seen
   (spec F6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import messages as m
from supervisor.fsproxy.handlers.connection import (
    do_attach,
    do_caps,
    do_narrow,
    do_ping,
    do_refuse,
)
from supervisor.fsproxy.handlers.fds import do_fd_call, do_fd_put
from supervisor.fsproxy.handlers.files import (
    do_close,
    do_open,
    do_read,
    do_seek,
    do_sync,
    do_truncate,
    do_write,
)
from supervisor.fsproxy.handlers.llm import do_chat, do_config, do_quota
from supervisor.fsproxy.handlers.names import (
    do_list,
    do_make,
    do_remove,
    do_rename,
    do_stat,
)

if TYPE_CHECKING:
    from supervisor.fsproxy.session import Handler

HANDLERS: dict[type[m.Request], Handler] = {
    m.Open: do_open,
    m.Read: do_read,
    m.Write: do_write,
    m.Close: do_close,
    m.Seek: do_seek,
    m.Sync: do_sync,
    m.Truncate: do_truncate,
    m.Stat: do_stat,
    m.ListDir: do_list,
    m.MakeDir: do_make,
    m.Remove: do_remove,
    m.Rename: do_rename,
    m.Ping: do_ping,
    m.Caps: do_caps,
    m.Attach: do_attach,
    m.Narrow: do_narrow,
    m.Chat: do_chat,
    m.Quota: do_quota,
    m.Config: do_config,
    m.FdCall: do_fd_call,
    m.FdPut: do_fd_put,
    m.Refusal: do_refuse,
}
"""The table: request class to handler."""
