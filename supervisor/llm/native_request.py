"""Changes to a request that is passed on in its own API (spec MD2).

Its model, the bound on its output, and members that the host needs to meter it; the rest
is sent byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.apis import CHAT, MESSAGES, RESPONSES, is_hosted

if TYPE_CHECKING:
    from supervisor.llm.apis import Api
    from supervisor.llm.gateway import Model
    from supervisor.llm.json_request import JsonRequest

LEAST_BUDGET = 1024
"""The smallest budget for thinking that the Messages API takes."""


def encode_native(
    api: Api,
    model: Model,
    request: JsonRequest,
    bound: int | None,
    *,
    temperature: float | None = None,
    drops_hosted_tools: bool = False,
) -> bytes:
    """Return the bytes to send for a request.

    Args:
        api: the API.
        model: the model.
        request: the received request.
        bound: most tokens of output; None leaves the request's own bound.
        temperature: the temperature for requests without one; None sets none.
        drops_hosted_tools: leave out tools that the provider runs itself.
    """
    asked = request.value
    changes: dict[str, object] = {"model": model.id}
    without: set[str] = set()
    if api.bounds:  # under the provider's name for it
        name = model.bound_name if api is CHAT else api.bounds[0]
        without = {one for one in api.bounds if one != name and one in asked}
        least = api.least_bound(asked, bound)
        if least is not None:
            changes[name] = least
            if api is MESSAGES:
                _lower_budget(asked.get("thinking"), least, changes)
    if api is CHAT:
        changes["stream"] = True
        changes["stream_options"] = {"include_usage": True}
    if temperature is not None and asked.get("temperature") is None:
        changes["temperature"] = temperature
    if drops_hosted_tools:
        _drop_hosted_tools(api, request, changes)
    texts = {
        name: msgspec.json.encode(value)
        for name, value in changes.items()
        if name not in asked or asked[name] != value
    }
    return request.with_changes(texts, without)


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
