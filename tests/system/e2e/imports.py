"""The late imports of a host, from an audit hook in its own process.

A directory for PYTHONPATH, whose `sitecustomize` notes each module that is looked for
(the event `import` of sys.addaudithook, raised for what is not in `sys.modules`), in
which thread, and by which line.
"""

from pathlib import Path

HOOK = """
import os, sys, threading
main, told = threading.get_ident(), os.environ.get("TEST_IMPORTS")

def tell(line):
    fd = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.write(fd, line.encode() + b"\\n")
    os.close(fd)

def hook(event, arguments):
    if event == "import":
        frame = sys._getframe(1)
        while frame.f_back and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        place = "main" if threading.get_ident() == main else "thread"
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        tell(f"{place} {arguments[0]}, for {where}")

if told and "handover-check" not in sys.orig_argv:
    tell("began")
    sys.addaudithook(hook)
"""


class Imports:
    """The imports of one process, and of each program that it becomes by exec(2).

    Args:
        where: a directory for two files.

    Attributes:
        env: variables that the process needs.
    """

    def __init__(self, where: Path) -> None:
        (where / "hook").mkdir()
        (where / "hook" / "sitecustomize.py").write_text(HOOK)
        self._told = where / "imports"
        self._seen = 0
        self.env = {"PYTHONPATH": str(where / "hook"), "TEST_IMPORTS": str(self._told)}

    def new(self) -> list[str]:
        """Return what the main thread has imported since this was asked before.

        Each is "MODULE, for FILE:LINE"; "began" stands where another program begins.
        """
        lines = self._told.read_text().splitlines()
        fresh, self._seen = lines[self._seen :], len(lines)
        return [line.removeprefix("main ") for line in fresh if line[:7] != "thread "]
