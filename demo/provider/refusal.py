"""Refusals that orders ask for."""

from dataclasses import dataclass, field
from typing import Any

from demo.provider.orders import Orders
from demo.provider.question import BOUNDS

PAGE = b"<html><body>as it was told</body></html>"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal.

    Attributes:
        status: of HTTP.
        text: the message.
        headers: beside the common ones.
        is_page: it is a page of HTML, not JSON in the API's form.
    """

    status: int
    text: str
    headers: dict[str, str] = field(default_factory=dict)
    is_page: bool = False


def refusal_for(
    orders: Orders, body: dict[str, Any], told: str, *, is_first: bool
) -> Refusal | None:
    """Return the refusal of a request; None if it is to be answered.

    Args:
        orders: of the request.
        body: of the request.
        told: its words on the key.
        is_first: the message comes for the first time.
    """
    status = int(orders.get("status", 0))
    if "once" in orders and is_first:
        status = int(orders["once"])
    if "redirect" in orders:
        place = {"location": orders["redirect"] or "/v1/elsewhere"}
        return Refusal(307, "it is elsewhere", place)
    if "leak-refused" in orders:
        return Refusal(status or 400, f"you sent\n{told}")
    if "newer" in orders and "max_tokens" in body:
        return Refusal(400, "Unsupported parameter: 'max_tokens'")
    least = int(orders.get("least", 0))
    if any(body.get(name) is not None and body[name] < least for name in BOUNDS):
        return Refusal(400, "the bound of the answer is too low")
    if status:
        later = {"retry-after": orders.get("retry-after", "0")}
        return Refusal(status, "as it was told", later, "page" in orders)
    return None
