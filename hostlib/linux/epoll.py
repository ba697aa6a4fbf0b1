"""The error text for epoll(7) without a watch left."""

NO_WATCH = (
    "no epoll watch is left to its user; end what holds them, or raise"
    " sysctl fs.epoll.max_user_watches"
)
"""The meaning of ENOSPC of epoll_ctl(2); a user's children share the number with its host."""
