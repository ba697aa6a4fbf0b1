"""ClientHellos: Python's own, and some of parts that no library combines."""

import ssl
import struct


def client_hello(name: str | None, *, legacy: bool = False) -> bytes:
    """Return what Python's TLS sends first.

    Args:
        name: of the server; None for none.
        legacy: with TLS 1.2 alone.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    if legacy:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake ended without a server")


def vector(size: int, data: bytes) -> bytes:
    """Return bytes with their length before them."""
    return len(data).to_bytes(size, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    """Return an extension."""
    return struct.pack("!H", kind) + vector(2, data)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    """Return a `server_name` extension."""
    entries = b"".join(bytes([kind]) + vector(2, name) for name in names)
    return extension(0, vector(2, entries))


def body(
    *extensions: bytes,
    session: bytes = b"",
    ciphers: bytes = b"\x13\x01",
    compressions: bytes = b"\0",
) -> bytes:
    """Return the body of a ClientHello."""
    head = b"\3\3" + bytes(32) + vector(1, session) + vector(2, ciphers)
    return head + vector(1, compressions) + vector(2, b"".join(extensions))


def message(data: bytes, kind: int = 1) -> bytes:
    """Return a handshake message."""
    return bytes([kind]) + vector(3, data)


def record(data: bytes, kind: int = 22, version: bytes = b"\3\1") -> bytes:
    """Return one TLS record."""
    return bytes([kind]) + version + vector(2, data)


def records(data: bytes, size: int) -> bytes:
    """Return a message in records of some size."""
    parts = (data[at : at + size] for at in range(0, len(data), size))
    return b"".join(map(record, parts))
