"""Changes to a request that is passed on in its own API (spec MD2).

Its model, the bound on its output, and members that the host needs to meter it; the rest
is sent byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.apis import CHAT, MESSAGES, RESPONSES, is_hosted

if TYPE_CHECKING:
    from hostlib.documents import Object
    from supervisor.llm.apis import Api
    from supervisor.llm.gateway import Model
    from supervisor.llm.json_request import JsonRequest

LEAST_BUDGET = 1024
"""The smallest budget for thinking that the Messages API takes."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes to requests for one model.

    Attributes:
        api: the API.
        model: the model.
        temperature: the temperature for requests without one; None sets none.
        drops_hosted_tools: leave out tools that the provider runs itself.
    """

    api: Api
    model: Model
    temperature: float | None = None
    drops_hosted_tools: bool = False

    def encode(self, request: JsonRequest, bound: int | None) -> bytes:
        """Return the bytes to send for a request.

        Args:
            request: the received request.
            bound: most tokens of output; None leaves the request's own bound.
        """
        asked = request.value
        changes: dict[str, object] = {"model": self.model.id}
        without: set[str] = set()
        if self.api.bounds:
            self._bound(asked, bound, changes, without)
        if self.api is CHAT:
            changes["stream"] = True
            changes["stream_options"] = {"include_usage": True}
        if self.temperature is not None and asked.get("temperature") is None:
            changes["temperature"] = self.temperature
        if self.drops_hosted_tools:
            _drop_hosted_tools(self.api, request, changes)
        texts = {
            name: msgspec.json.encode(value)
            for name, value in changes.items()
            if name not in asked or asked[name] != value
        }
        return request.with_changes(texts, without)

    def _bound(
        self,
        asked: Object,
        bound: int | None,
        changes: dict[str, object],
        without: set[str],
    ) -> None:
        """Set the bound, under the provider's name for it."""
        least = self.api.least_bound(asked, bound)
        name = self.model.bound_name if self.api is CHAT else self.api.bounds[0]
        without |= {one for one in self.api.bounds if one != name and one in asked}
        if least is not None:
            changes[name] = least
            if self.api is MESSAGES:
                _lower_budget(asked.get("thinking"), least, changes)


def _drop_hosted_tools(
    api: Api, request: JsonRequest, changes: dict[str, object]
) -> None:
    """Leave out the provider's tools, also in items that hold tools."""
    asked = request.value
    if any(map(is_hosted, asked.get("tools") or ())):
        tools = msgspec.json.decode(request.text_of("tools"))
        changes["tools"] = _without_hosted(tools)
    items = asked.get(api.items)
    if api is RESPONSES and isinstance(items, list) and any(map(_has_hosted, items)):
        items = msgspec.json.decode(request.text_of(api.items))
        for item in filter(_has_hosted, items):
            item["tools"] = _without_hosted(item["tools"])
        changes[api.items] = items


def _has_hosted(item: object) -> bool:
    tools = item.get("tools") if isinstance(item, dict) else None
    return isinstance(tools, list) and any(map(is_hosted, tools))


def _without_hosted(tools: list[object]) -> list[object]:
    return [tool for tool in tools if not is_hosted(tool)]


def _lower_budget(thinking: object, bound: int, changes: dict[str, object]) -> None:
    """Lower the budget for thinking, which must be below the bound."""
    if not isinstance(thinking, dict):
        return
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or budget < bound:
        return
    if bound > LEAST_BUDGET:
        changes["thinking"] = {**thinking, "budget_tokens": bound - 1}
    else:
        changes["thinking"] = {"type": "disabled"}
