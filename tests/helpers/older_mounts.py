"""A kernel with fewer ways to mount: the missing calls are refused.

A wrapper for `tests.helpers.command.sandhost`, for the host and its launchpad. It
refuses what such a one refuses, and nothing else of it is played: a call that only this
kernel has is found by running on that one.
"""

import sys

PATCH = '''
def patch(minor, maps_owners):
    import errno, os, types
    from hostlib.linux import mount_calls
    from supervisor.spawn.launchpad.layers import overlay
    clone, set_fd = 1, 5

    def refuse():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def is_here(fd):
        """Tell whether a mount is in this thread's mount namespace."""
        try:
            with open("/proc/thread-self/mountinfo", "rb") as table:
                numbers = [line.split()[0] for line in table]
        except FileNotFoundError:  # it was entered for this mount, and has no such /proc
            return True
        return overlay.read_mount_number(fd) in numbers

    def older_tree(call):
        def open_tree(fd, path, flags):
            if minor < 15 and flags & clone and not path and not is_here(fd):
                refuse()
            return call(fd, path, flags)
        return open_tree

    def older_config(call):
        def fsconfig(config, command, key, value, fd):
            is_older = minor < 13 or (minor < 15 and not is_here(fd))
            if command == set_fd and is_older:
                refuse()
            return call(config, command, key, value, fd)
        return fsconfig

    def no_owners(fd, attributes, *rest, **more):
        if attributes & mount_calls.ATTR_IDMAP:
            refuse()
        return set_attributes(fd, attributes, *rest, **more)

    mount_calls.open_tree = older_tree(mount_calls.open_tree)
    mount_calls.fsconfig = older_config(mount_calls.fsconfig)
    set_attributes = mount_calls.set_attributes
    if not maps_owners:
        calls = {**vars(mount_calls), "set_attributes": no_owners}
        overlay.mount_calls = types.SimpleNamespace(**calls)
'''

RUN = """
import runpy, sys
patch, how, *command = sys.argv[1:]
code = f"exec({patch!r}); patch({how})"
exec(code)
from supervisor.spawn.launchpad import start
start._BOOT += f" {code};"
sys.argv = command
runpy.run_path(command[0], run_name="__main__")
"""


def linux_6(minor: int, *, maps_owners: bool = True) -> tuple[str, ...]:
    """Return what runs a Python command where mounts are made as by Linux 6.MINOR.

    Args:
        minor: 15 has all; 13 takes layers that are attached, by descriptor; less, by name.
        maps_owners: or no layer shows owners otherwise, as before 5.19.
    """
    return sys.executable, "-c", RUN, PATCH, f"{minor}, {maps_owners}"
