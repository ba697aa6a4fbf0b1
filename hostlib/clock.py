"""Times of day as text."""

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """Return seconds since the epoch as RFC 3339 in UTC."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")
