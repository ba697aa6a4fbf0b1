"""The rows of both tables of a host, as the contract prints them (spec S1)."""

from vfs.clients import file_row
from vfs.filesystem import Filesystem


def client_rows(fs: Filesystem) -> list[dict[str, object]]:
    """Return the client table."""
    return [client.row() for client in fs.tables.clients.values()]


def file_rows(fs: Filesystem) -> list[dict[str, object]]:
    """Return the file table."""
    return [file_row(file) for file in fs.tables.files.values()]
