"""The contract's second example of resource management: it closes what it opened."""

from vfs.client import Client


def main() -> None:
    """Open a file, write to it, close it, and end."""
    client = Client()
    fileno = client.open("temp.txt", "w", True)
    client.write(fileno, b"data")
    client.close(fileno)


main()
