"""Requests of the Responses API in the form of Chat Completions."""

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.llm.responses_request import translate_request
from supervisor.llm.translation import UntranslatableError

Object = dict[str, Any]

GRAMMAR = 'start: "*** Begin Patch" /.+/'


def function(name: str, **fields: object) -> Object:
    """Return a tool of type ``function``."""
    return {"type": "function", "name": name, **fields}


def chat_function(name: str, **fields: object) -> Object:
    """Return the same in the form of Chat Completions."""
    return {"type": "function", "function": {"name": name, **fields}}


def message(role: str, *texts: str, part: str = "input_text") -> Object:
    """Return an item with texts."""
    parts = [{"type": part, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}


def call(call_id: str, name: str = "ls", **fields: object) -> Object:
    """Return a call of a function."""
    item = {"type": "function_call", "call_id": call_id, "name": name, **fields}
    return {"arguments": "{}", **item}


def output(call_id: str, text: object = "done") -> Object:
    """Return what a call returned."""
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def chat_call(call_id: str, name: str = "ls", arguments: str = "{}") -> Object:
    """Return a call in the form of Chat Completions."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, content: object = "done") -> Object:
    """Return the message with what a call returned."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def messages(*items: object, **fields: object) -> list[Object]:
    """Return the messages that items become."""
    body = translate_request({"input": list(items), **fields}).body
    found: list[Object] = body["messages"]
    return found


def refused_field(asked: Object, *, drops: bool) -> str | None:
    """Return the field that a request is refused for; None if it is translated."""
    try:
        translate_request(asked, drops_hosted_tools=drops)
    except UntranslatableError as why:
        return why.field
    return None


CODEX: Object = {
    "model": "any",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"session_id": "01a2"},
    "reasoning": {"effort": "high", "summary": "auto", "context": "all_turns"},
    "text": {"verbosity": "low"},
    "service_tier": "auto",
    "instructions": "You are an agent.",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "tools": [
        function(
            "exec_command", description="Runs.", strict=False, parameters={"a": 1}
        ),
        {
            "type": "namespace",
            "name": "agents",
            "description": "Other agents.",
            "tools": [
                function("spawn", description="Starts one.", parameters={}),
                function("close"),
            ],
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits.",
            "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
        },
        {"type": "web_search", "external_web_access": True},
        {"type": "image_generation", "output_format": "png"},
    ],
    "input": [
        {**message("developer", "Rules.", "Skills."), "id": "msg_0"},
        message("user", "In a directory.", "make a file"),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": None,
            "encrypted_content": "gAAA",
        },
        {**message("assistant", "I look", part="output_text"), "status": "completed"},
        call("c1", "exec_command", arguments='{"cmd":"ls"}', id="fc_1"),
        call("c2", "spawn", namespace="agents"),
        {
            "type": "custom_tool_call",
            "call_id": "c3",
            "name": "apply_patch",
            "input": 'a"b',
        },
        output("c1", "a.txt"),
        output("c2"),
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "ok"},
    ],
}
"""A request of Codex, shortened."""


# spec MD2: all of it has a form, or is dropped and counted.
def test_a_request_of_codex_is_translated() -> None:
    asked = copy.deepcopy(CODEX)
    found = translate_request(asked, drops_hosted_tools=True)
    assert asked == CODEX
    assert found.body == {
        "messages": [
            {"role": "system", "content": "You are an agent.\n\nRules.\n\nSkills."},
            {"role": "user", "content": "In a directory.\n\nmake a file"},
            {
                "role": "assistant",
                "content": "I look",
                "tool_calls": [
                    chat_call("c1", "exec_command", '{"cmd":"ls"}'),
                    chat_call("c2", "agents__spawn"),
                    chat_call("c3", "apply_patch", '{"input":"a\\"b"}'),
                ],
            },
            result("c1", "a.txt"),
            result("c2"),
            result("c3", "ok"),
        ],
        "tools": [
            chat_function(
                "exec_command", description="Runs.", strict=False, parameters={"a": 1}
            ),
            chat_function(
                "agents__spawn",
                description="About all tools named agents__*: Other agents.\n\nStarts one.",
                parameters={},
            ),
            chat_function("agents__close"),
            chat_function(
                "apply_patch",
                description="Edits.",
                parameters={
                    "type": "object",
                    "properties": {
                        "input": {
                            "type": "string",
                            "description": f"A text that matches this lark grammar:\n{GRAMMAR}",
                        }
                    },
                    "required": ["input"],
                    "additionalProperties": False,
                },
            ),
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "high",
    }
    assert found.max_tokens is None
    assert found.namespaced == {
        "agents__spawn": ("agents", "spawn"),
        "agents__close": ("agents", "close"),
    }
    assert found.custom == {"apply_patch"}
    assert sorted(found.dropped) == [
        "client_metadata",
        "include",
        "input.reasoning",
        "prompt_cache_key",
        "reasoning.context",
        "reasoning.summary",
        "service_tier",
        "store",
        "text.verbosity",
        "tools.image_generation",
        "tools.web_search",
    ]


# spec MD2
@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
        ({"user": "u"}, {"user": "u"}),
        ({"text": {"format": {"type": "text"}}}, {}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "n",
                        "schema": {"type": "object"},
                        "strict": True,
                        "description": None,
                    }
                }
            },
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "schema": {"type": "object"},
                        "strict": True,
                    },
                }
            },
        ),
        # A provider refuses these where there are no tools.
        ({"tools": [], "tool_choice": "none", "parallel_tool_calls": True}, {}),
        # Fields without effect, or that are read elsewhere.
        (
            {
                "background": False,
                "previous_response_id": None,
                "conversation": None,
                "truncation": "disabled",
                "top_logprobs": 0,
                "stream_options": {"include_obfuscation": False},
                "metadata": None,
                "unheard_of": None,
            },
            {},
        ),
    ],
)
def test_a_field_has_its_form(asked: Object, wanted: Object) -> None:
    found = translate_request({"input": "hi", **asked})
    hello = [{"role": "user", "content": "hi"}]
    assert found.body == {"messages": hello, **wanted}
    assert found.dropped == ()


# spec MD2
def test_the_bound_on_the_output_stands_apart() -> None:
    found = translate_request({"input": "hi", "max_output_tokens": 7})
    assert found.max_tokens == 7
    assert list(found.body) == ["messages"]


# spec MD2: nothing is dropped in silence, and the field is named.
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"metadata": {}}, "metadata"),
        ({"safety_identifier": "x"}, "safety_identifier"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"n": 2}, "n"),
        ({"x" * 200: 1}, "x" * 100),
        ({"temperature": True}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1.0}, "max_output_tokens"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"input": [{"type": "compaction"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{**message("user", "x"), "y": 1}]}, "input[0].y"),
        ({"input": [message("user", "x", part="input_audio")]}, "input[0].content[0].type"),
        ({"input": [message("system", "x", part="input_image")]}, "input[0].content[0].type"),
        ({"input": [message("user", "x", part="refusal")]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "file_id": "f"}],
                    }
                ]
            },
            "input[0].content[0].file_id",
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "file:///x"}],
                    }
                ]
            },
            "input[0].content[0].image_url",
        ),
        ({"input": ["x", output("c1")]}, "input[0]"),
        ({"input": [output("c1")]}, "input[0].call_id"),
        ({"input": [call("c1", "a b")]}, "input[0].name"),
        ({"input": [call("c1", arguments={})]}, "input[0].arguments"),
        ({"input": [call("c1"), output("c1", None)]}, "input[1].output"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [function("a.b")]}, "tools[0].name"),
        ({"tools": [function("a" * 65)]}, "tools[0].name"),
        ({"tools": [function("a"), function("a")]}, "tools[1].name"),
        ({"tools": [function("a", defer_loading=True)]}, "tools[0].defer_loading"),
        ({"tools": [function("a", output_schema={})]}, "tools[0].output_schema"),
        ({"tools": [function("a", parameters=[])]}, "tools[0].parameters"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "x"}}]},
            "tools[0].format.type",
        ),
        (
            {
                "tools": [
                    function("a__b"),
                    {"type": "namespace", "name": "a", "tools": [function("b")]},
                ]
            },
            "tools[1].tools[0].name",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "a" * 60, "tools": [function("bcd")]}
                ]
            },
            "tools[0].tools[0].name",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}
                ]
            },
            "tools[0].tools[0].type",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": function("a")}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {"tools": [function("a")], "tool_choice": {"type": "custom", "name": "a"}},
            "tool_choice.name",
        ),
        (
            {
                "tools": [function("a")],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [function("b")],
                },
            },
            "tool_choice.tools[0].name",
        ),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_name(asked: Object, field: str) -> None:
    with pytest.raises(UntranslatableError) as caught:
        translate_request({"input": "hi", **asked})
    assert caught.value.field == field
    assert 0 < len(caught.value.reason) <= 160
    assert str(caught.value) == f"{field}: {caught.value.reason}"


# spec MD2: where Codex knows the model, its tools stand in the input.
def test_additional_tools_are_tools() -> None:
    more = {"type": "additional_tools", "id": "at_1", "role": "developer"}
    found = translate_request(
        {
            "input": [{**more, "tools": TOOLS[1:]}, message("user", "hi")],
            "tools": TOOLS[:1],
            "tool_choice": "required",
        }
    )
    assert found.body["messages"] == [{"role": "user", "content": "hi"}]
    names = {tool["function"]["name"] for tool in found.body["tools"]}
    assert names == {"a", "c", "n__x", "n__y"}
    assert found.custom == {"c"}
    assert refused_field({"input": [{**more, "tools": [7]}]}, drops=True) == (
        "input[0].tools[0]"
    )
    assert refused_field({"input": [more]}, drops=True) == "input[0].tools"


# spec MD2: a type that is no text is not looked up among the hosted ones.
@pytest.mark.parametrize("kind", [[], {}, None])
def test_a_type_is_a_text(kind: object) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}
    asked = {"input": "hi", "tools": TOOLS, "tool_choice": choice}
    assert refused_field(asked, drops=True) == "tool_choice.tools[0].type"
    asked = {"input": "hi", "tools": [{"type": kind}]}
    assert refused_field(asked, drops=True) == "tools[0].type"


# spec MD2: dropped only where it was configured; what a client runs itself never is.
def test_tools_of_the_provider_are_dropped_if_configured() -> None:
    tools = [{"type": "web_search_preview"}, {"type": "web_search_preview"}]
    found = translate_request(
        {"input": "hi", "tools": tools, "tool_choice": "auto"}, drops_hosted_tools=True
    )
    assert found.dropped == ("tools.web_search_preview",)
    assert list(found.body) == ["messages"]
    shell = {"type": "shell", "environment": {"type": "local"}}
    for fields in ({"tools": [shell]}, {"tool_choice": "required"}):
        with pytest.raises(UntranslatableError):
            translate_request(
                {"input": "hi", "tools": tools, **fields}, drops_hosted_tools=True
            )


# spec MD2: as in a request that is passed on, a tool is the provider's unless a client is
# known to run it.
@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_2099_12_31"},
        {"type": "mcp", "server_label": "x", "server_url": "https://example.org"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "shell"},
        {"type": "tool_search"},
    ],
)
def test_tools_of_the_provider_are_those_of_all_apis(tool: Object) -> None:
    asked: Object = {"input": "hi", "tools": [function("a"), tool]}
    found = translate_request(asked, drops_hosted_tools=True)
    assert [one["function"]["name"] for one in found.body["tools"]] == ["a"]
    assert found.dropped == (f"tools.{tool['type']}",)
    with pytest.raises(UntranslatableError, match='hosted_tools = "drop"'):
        translate_request(asked)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [function("a"), tool]}
    found = translate_request({**asked, "tool_choice": choice}, drops_hosted_tools=True)
    assert found.body["tool_choice"] == "auto"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "local_shell"},
        {"type": "apply_patch"},
        {"type": "shell", "environment": {"type": "local"}},
    ],
)
def test_tools_of_the_client_are_never_dropped(tool: Object) -> None:
    asked: Object = {"input": "hi", "tools": [function("a"), tool]}
    with pytest.raises(UntranslatableError, match="no form for the tool") as caught:
        translate_request(asked, drops_hosted_tools=True)
    assert "hosted_tools" not in str(caught.value)


TOOLS = [
    function("a"),
    {"type": "custom", "name": "c"},
    {"type": "namespace", "name": "n", "tools": [function("x"), function("y")]},
]


# spec MD2
@pytest.mark.parametrize(
    ("choice", "wanted", "names"),
    [
        ("none", "none", "a c n__x n__y"),
        ("required", "required", "a c n__x n__y"),
        (function("a"), chat_function("a"), "a c n__x n__y"),
        ({"type": "custom", "name": "c"}, chat_function("c"), "a c n__x n__y"),
        (function("x", namespace="n"), chat_function("n__x"), "a c n__x n__y"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    function("y", namespace="n"),
                    {"type": "custom", "name": "c"},
                    {"type": "web_search"},
                ],
            },
            "required",
            "c n__y",
        ),
    ],
)
def test_a_choice_among_tools(choice: object, wanted: object, names: str) -> None:
    found = translate_request(
        {"input": "hi", "tools": TOOLS, "tool_choice": choice}, drops_hosted_tools=True
    )
    assert found.body["tool_choice"] == wanted
    offered = [tool["function"]["name"] for tool in found.body["tools"]]
    assert offered == names.split()


# spec MD2: the text and the calls of one answer are one message.
def test_an_answer_is_one_message() -> None:
    said = message("assistant", "a", "b", part="output_text")
    assert messages(message("user", "hi"), said, call("1"), call("2")) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "ab",
            "tool_calls": [chat_call("1"), chat_call("2")],
        },
    ]
    # Text after a call belongs to it, since only results may follow a call.
    assert messages(call("1"), said, output("1")) == [
        {"role": "assistant", "content": "ab", "tool_calls": [chat_call("1")]},
        result("1"),
    ]


# spec MD2: what was asked for after a result is another answer.
def test_calls_after_a_result_are_another_message() -> None:
    found = messages(call("1"), output("1"), call("2"), output("2"))
    calls = [[c["id"] for c in m.get("tool_calls", [])] for m in found]
    assert calls == [["1"], [], ["2"], []]
    texts = [message("assistant", text, part="output_text") for text in "ab"]
    assert [m["content"] for m in messages(*texts)] == ["a", "b"]


# spec MD2: Chat takes results nowhere but after their calls.
def test_a_result_follows_its_call() -> None:
    found = messages(
        call("1"), call("2"), message("user", "and?"), output("2"), output("1")
    )
    assert found[1:] == [result("2"), result("1"), {"role": "user", "content": "and?"}]
    assert found[0] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [chat_call("1"), chat_call("2")],
    }


# spec MD2: a result has no images in Chat; a user's message has.
def test_images_are_told_by_the_user() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    text = {"type": "input_text", "text": "look"}
    detailed = {**image, "detail": "low"}
    assert messages({"role": "user", "content": [text, detailed]}) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {
                    "type": "image_url",
                    "image_url": {**shown["image_url"], "detail": "low"},  # type: ignore[dict-item] # an object
                },
            ],
        }
    ]
    found = messages(
        call("1"), call("2"), output("1", [image]), output("2", [text, text])
    )
    assert found[1:] == [
        result("1", "See what follows."),
        result("2", "look\n\nlook"),
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What the call 1 returned:"},
                shown,
            ],
        },
    ]


FILE = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}


# spec MD2: Chat has a place for a file that comes with the request.
def test_a_file_is_carried() -> None:
    part = {"type": "input_file", **FILE}
    chat = {"type": "file", "file": FILE}
    assert messages({"role": "user", "content": [part]}) == [
        {"role": "user", "content": [chat]}
    ]
    found = messages(call("1"), output("1", [part]))
    said = {"type": "text", "text": "What the call 1 returned:"}
    assert found[1:] == [
        result("1", "See what follows."),
        {"role": "user", "content": [said, chat]},
    ]


# spec MD2: what the provider keeps is another child's, perhaps, and an address is none.
@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"file_id": "file_1"}, "file_id"),
        ({"file_url": "https://a.example/b.pdf"}, "file_url"),
        ({"filename": "a.pdf"}, "file_data"),
        ({**FILE, "file_data": "https://a.example/b.pdf"}, "file_data"),
    ],
)
def test_a_file_that_is_not_there_is_refused(
    part: dict[str, object], field: str
) -> None:
    with pytest.raises(UntranslatableError) as refused:
        messages({"role": "user", "content": [{"type": "input_file", **part}]})
    assert refused.value.field == f"input[0].content[0].{field}"


# spec MD2
def test_what_an_answer_says_of_itself_is_left_out() -> None:
    said = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "phase": "final_answer",
        "content": [
            {"type": "output_text", "text": "no", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "I may not"},
        ],
    }
    found = translate_request({"input": [said]})
    assert found.body["messages"] == [
        {"role": "assistant", "content": "no", "refusal": "I may not"}
    ]
    assert found.dropped == ("input.phase",)


# spec MD2: many chat templates take one, as the first.
def test_system_messages_in_a_row_are_one() -> None:
    found = messages(
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "developer", "content": "e"},
        instructions="a",
    )
    assert [(m["role"], m["content"]) for m in found] == [
        ("system", "a\n\nb\n\nc"),
        ("user", "d"),
        ("system", "e"),
    ]


# spec MD2, MD7: what is told of a namespace is not repeated for each of its tools.
def test_the_result_is_as_long_as_the_request() -> None:
    tools = [function(f"f{number}") for number in range(500)]
    space = {"type": "namespace", "name": "n", "description": "d" * 10_000}
    asked = {"input": "hi", "tools": [{**space, "tools": tools}]}
    body = json.dumps(translate_request(asked).body)
    assert len(body) < 3 * len(json.dumps(asked))


WORDS = st.sampled_from(
    [
        "message", "user", "assistant", "system", "developer", "input_text", "refusal",
        "output_text", "input_image", "function", "custom", "namespace", "web_search",
        "function_call", "function_call_output", "custom_tool_call", "reasoning",
        "custom_tool_call_output", "allowed_tools", "auto", "required", "none", "a", "b",
        "grammar", "text", "json_schema", "https://x", "disabled", "",
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "type", "role", "content", "text", "name", "namespace", "call_id", "arguments",
        "output", "input", "tools", "format", "mode", "image_url", "refusal", "schema",
        "strict", "parameters", "description", "syntax", "definition", "effort", "x",
    ]
)  # fmt: skip
FIELDS = st.sampled_from(
    [*CODEX, "temperature", "max_output_tokens", "conversation", "background", "x"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=6)
REQUESTS = st.fixed_dictionaries(
    {"input": st.lists(OBJECTS, max_size=4) | JSON},
    optional={
        "tools": st.lists(OBJECTS, max_size=3) | JSON,
        "tool_choice": OBJECTS | JSON,
        "text": OBJECTS,
        "reasoning": OBJECTS,
    },
) | st.dictionaries(FIELDS, JSON, max_size=5)


# spec MD2
@pytest.mark.slow
@settings(max_examples=100)
@given(asked=REQUESTS, drops=st.booleans())
def test_any_json_is_translated_or_refused(asked: Object, *, drops: bool) -> None:
    if refused_field(asked, drops=drops) is None:
        found = translate_request(asked, drops_hosted_tools=drops)
        assert found.body["messages"]
        json.dumps(found.body)


@st.composite
def changed(draw: st.DrawFn) -> Object:
    """Return a request of Codex in which one value is another."""
    asked = copy.deepcopy(CODEX)
    at: Any = asked
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys))
        if not at[key] or not isinstance(at[key], dict | list) or draw(st.booleans()):
            at[key] = draw(JSON)
            return asked
        at = at[key]


# spec MD2: however deep it stands.
@pytest.mark.slow
@settings(max_examples=100)
@given(asked=changed())
def test_a_field_of_another_type_is_no_crash(asked: Object) -> None:
    field = refused_field(asked, drops=True)
    assert field is None or re.split(r"[.[]", field)[0] in CODEX
