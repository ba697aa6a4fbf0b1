"""The contract's first example of resource management: it ends without any CLOSE."""

import os

from vfs.client import Client


def main() -> None:
    """Open two files, write to them, and exit with 1 as if something had gone wrong."""
    client = Client()
    first = client.open("temp1.txt", "w", True)
    second = client.open("temp2.txt", "w", True)
    client.write(first, b"data1")
    client.write(second, b"data2")
    os._exit(1)


main()
