"""A request that is sent on by the API that it came by: what of it is changed (spec MD2).

Its model, the bound on its output, and what the host needs to meter it; all else goes on
byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from supervisor.llm.apis import CHAT, MESSAGES, RESPONSES, is_hosted

if TYPE_CHECKING:
    from supervisor.llm.apis import Api
    from supervisor.llm.gateway import Model
    from supervisor.llm.json_request import JsonRequest

LEAST_BUDGET = 1024
"""The smallest budget for thinking that the Messages API takes."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What becomes of requests.

    Attributes:
        api: by which they are asked.
        model: that they go to.
        temperature: for those that name none; None leaves them as they are.
        drops_hosted_tools: tools that the provider runs itself are left out.
    """

    api: Api
    model: Model
    temperature: float | None = None
    drops_hosted_tools: bool = False

    def encode(self, request: JsonRequest, bound: int | None) -> bytes:
        """Return a request as it is sent.

        Args:
            request: as it came.
            bound: the most tokens of output; None leaves the request's own.
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
        asked: dict[str, Any],
        bound: int | None,
        changes: dict[str, object],
        without: set[str],
    ) -> None:
        """Put the bound in, by the one name that the provider knows for it."""
        told = [asked[name] for name in self.api.bounds if asked.get(name) is not None]
        least = min((*told, *([] if bound is None else [bound])), default=None)
        name = self.model.bound_name if self.api is CHAT else self.api.bounds[0]
        without |= {one for one in self.api.bounds if one != name and one in asked}
        if least is not None:
            changes[name] = least
            if self.api is MESSAGES:
                _lower_budget(asked.get("thinking"), least, changes)


def _drop_hosted_tools(
    api: Api, request: JsonRequest, changes: dict[str, object]
) -> None:
    """Leave out what the provider runs, among the tools and in items that hold some."""
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
    """Lower the budget for thinking with the bound: it has to lie below it."""
    if not isinstance(thinking, dict):
        return
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or budget < bound:
        return
    if bound > LEAST_BUDGET:
        changes["thinking"] = {**thinking, "budget_tokens": bound - 1}
    else:
        changes["thinking"] = {"type": "disabled"}
