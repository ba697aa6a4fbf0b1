"""Steps that change a directory, the same for one seed.

A program, and the model of it.

A step that was cut off may be done again: its end is the same. As a program it takes its
steps in the working directory, each synced before it says so on stdout in a line.
"""

import contextlib
import os
import random
import shutil
import sys
import time

FILES = ("a", "b", "d/a", "d/b", "d/e/a", "f/g/c", "x/a")
DIRECTORIES = ("d", "d/e", "f", "f/g", "x")
KINDS = (
    "write",
    "write",
    "replace",
    "replace",
    "remove",
    "remove_tree",
    "mode",
    "move",
)

PAUSE_S = 0.003
"""So that many steps are not taken before anything is killed."""


class Step:
    """One of the steps of a seed.

    Args:
        seed: of all of them.
        number: of this one, from 0.
        moves: there are renamed directories among them.
    """

    def __init__(self, seed: int, number: int, *, moves: bool) -> None:
        rng = random.Random(f"{seed} {number}")
        self.kind = rng.choice(KINDS if moves else KINDS[:-1])
        self.path = rng.choice(FILES)
        self.directory, self.other = rng.sample(DIRECTORIES, 2)
        self.mode = rng.choice((0o600, 0o644, 0o755))
        self.content = b"%d %d\n" % (seed, number) * rng.choice((1, 10, 5000))

    @property
    def touched(self) -> tuple[str, ...]:
        """Return the paths that may have any content while it is taken."""
        if self.kind in {"remove_tree", "move"}:
            return self.directory, self.other
        return self.path, f"{self.path}.new"

    def take(self, top: str) -> None:
        """Change a directory; what cannot be done is not."""
        with contextlib.suppress(OSError):
            getattr(self, f"_{self.kind}")(top)

    def _write(self, top: str, name: str = "") -> None:
        path = os.path.join(top, name or self.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(fd, self.content)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _replace(self, top: str) -> None:
        self._write(top, f"{self.path}.new")
        os.rename(os.path.join(top, f"{self.path}.new"), os.path.join(top, self.path))

    def _remove(self, top: str) -> None:
        os.unlink(os.path.join(top, self.path))

    def _remove_tree(self, top: str) -> None:
        shutil.rmtree(os.path.join(top, self.directory))

    def _mode(self, top: str) -> None:
        os.chmod(os.path.join(top, self.path), self.mode)

    def _move(self, top: str) -> None:
        target = os.path.join(top, self.other)
        if not os.path.exists(target):
            os.rename(os.path.join(top, self.directory), target)


def main(seed: int, first: int, count: int, *, moves: bool) -> None:
    """Take steps here; say each when it is on the disk."""
    top = os.open(".", os.O_RDONLY)
    for number in range(first, first + count):
        Step(seed, number, moves=moves).take(".")
        os.fsync(top)
        os.write(1, b"%d\n" % number)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), moves=sys.argv[4] == "moves")
