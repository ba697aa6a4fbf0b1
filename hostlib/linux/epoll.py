"""What epoll(7) says where no watch is left."""

NO_WATCH = (
    "no epoll watch is left to its user; end what holds them, or raise"
    " sysctl fs.epoll.max_user_watches"
)
"""What ENOSPC of epoll_ctl(2) says: a user's children share that number with its host."""
