"""A stand-in for a provider that gives a key away, in every form that is promised.

The forms that docs/explanation/security.md names, and what an answer of `demo/provider` says of the
key with them.
"""

import base64
import json
from urllib.parse import quote

_TAIL = b"?tail"
"""Stands after a key in base64, so that the key decides nothing but its own characters."""

_OFFSETS = range(3)
_ALPHABETS = {"base64": base64.b64encode, "base64 of URLs": base64.urlsafe_b64encode}


def _but_letters(key: str, escape: str) -> str:
    """Write as escapes what in a key is no letter, digit or hyphen."""
    return "".join(c if c.isalnum() or c == "-" else escape.format(ord(c)) for c in key)


def _told_forms(key: str) -> dict[str, str]:
    """Return what a provider could say of a key, by the name of the form."""
    found = {
        "as it is": key,
        "URL": _but_letters(key, "%{:02X}"),
        "URL in lower case": _but_letters(key, "%{:02x}"),
        "URL with slashes": quote(key),
        "JSON of PHP": json.dumps(key)[1:-1].replace("/", "\\/"),
        "JSON of a page": _but_letters(key, "\\u{:04X}"),
        "JSON of a page in lower case": _but_letters(key, "\\u{:04x}"),
    }
    for kind, encode in _ALPHABETS.items():
        for offset in _OFFSETS:
            data = b"x" * offset + key.encode() + _TAIL
            found[f"{kind} at {offset}"] = encode(data).decode()
    return found


def searched_forms(key: str) -> dict[str, str]:
    """Return what nobody may see: of base64 the characters that the key alone decides."""
    found = _told_forms(key)
    for kind in _ALPHABETS:
        for offset in _OFFSETS:
            bits = 8 * offset, 8 * (offset + len(key))
            name = f"{kind} at {offset}"
            found[name] = found[name][-(-bits[0] // 6) : bits[1] // 6]
    return found


NAMES = tuple(_told_forms("key"))


def in_every_form(authorization: str) -> str:
    """Return what a stand-in says of a key that came: all forms of it."""
    key = authorization.removeprefix("Bearer ")
    return "; ".join(f"{name}: {form}" for name, form in _told_forms(key).items())
