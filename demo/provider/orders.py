"""The orders that tell the stand-in how to behave, as words of a prompt."""

import re

ORDERS = {
    # What the answer says.
    "words=N": "answer with N words",
    "say=TEXT": "answer with TEXT, underscores as blanks",
    "think=N": "reason with N words before the answer",
    "hidden=N": "count N tokens of reasoning that the answer does not show",
    "giant=N": "answer with one word of N MiB",
    "endless": "answer with words without end",
    "tool": "answer with a call of the first tool",
    "script=JSON": "in the user's last message: a list of answers, one for each round;"
    " an answer is a text as for !say, or a list of [tool, arguments] to call",
    # When it comes.
    "slow=S": "wait S seconds before each piece of the answer",
    "wait=S": "wait S seconds before the answer begins",
    "first=S": "send the head of the answer, and wait S seconds",
    "hang": "never answer",
    "hang-after=N": "send N pieces, then nothing more",
    # Refusals.
    "status=N": "refuse with an HTTP status",
    "once=N": "refuse the first try of this message with an HTTP status",
    "retry-after=S": "with a refusal: the header",
    "code=TEXT": "with a refusal, or an error in a stream: its code and type",
    "page": "with a refusal: a page of HTML in place of JSON",
    "redirect=URL": "send the client elsewhere, with 307",
    "newer": "refuse max_tokens: the model knows max_completion_tokens alone",
    "least=N": "refuse a bound of the answer below N tokens",
    # What is counted.
    "prompt-tokens=N": "report N tokens for the prompt",
    "output-tokens=N": "report N tokens for the answer",
    "cached=N": "report N tokens of the prompt as cached; null works too",
    "written=N": "report N tokens of the prompt as written to the cache",
    "usage=TEXT": "none: report no usage; bad: report texts instead of numbers",
    "dense": "count each byte of the prompt as a token, and an image as 2,000",
    # Answers that are not as they should be.
    "plain": "do not stream, whatever was asked for",
    "stream": "stream, whatever was asked for",
    "foreign=API": "answer in the form of another API: chat, responses or messages",
    "broken": "answer with what is no JSON",
    "truncated": "break off in the middle",
    "cut=N": "break off after N bytes of the body",
    "unended": "break off after the last event",
    "empty": "answer without choices, output or content",
    "nothing": "answer with an empty body",
    "huge=N": "answer with N MiB that are no answer",
    "error=FORM": "fail in the middle of the stream, by an event; of Responses: error"
    " (so without a FORM) or failed",
    "twice=N": "send the event at place N (from 0) twice",
    "swap=N": "send the event at place N after the next one",
    "drop=NAME": "leave out the events of that type; several by commas",
    "lack=NAME": "leave out the fields of that name, wherever they are; by commas",
    "pings": "send a sign of life before each piece",
    "kind=TEXT": "send TEXT as the content type",
    "header=NAME:TEXT": "send a header; several by several orders",
    "stop=TEXT": "report TEXT as the reason for the end",
    # Answers that give the key away.
    "leak": "answer with the key that came with the request",
    "leak-tool": "answer with a call of a tool whose arguments hold that key",
    "leak-refused": "refuse with a message that holds the key",
    "leak-error": "fail in the middle of the stream with a message that holds the key",
    "leak-thought": "reason with the key",
    "leak-field=NAME": "put the key into the fields of that name, wherever they are",
    "leak-name": "put the key into the answer as the name of a field",
    "leak-event": "send events whose SSE name, comment and id hold the key",
    "leak-header": "send the key in headers of the answer",
}
"""Each order without the `!` before it, and what it says."""

CALLING = frozenset({"tool", "calls", "leak-tool"})
"""Orders that make the answer call tools; `calls` comes from scripts alone."""

_ORDER = re.compile(r"!([a-z-]+)(?:=(\S+))?")

Orders = dict[str, str]
"""What an answer was told: the order's name, and its text."""


def read_orders(text: str) -> Orders:
    """Return the orders in a text; the last of a name holds, headers are gathered."""
    orders: Orders = {}
    for name, value in _ORDER.findall(text):
        gathers = name == "header" and name in orders
        orders[name] = f"{orders[name]} {value}" if gathers else value
    return orders


def calls_tools(orders: Orders) -> bool:
    """Return whether the answer is to call tools."""
    return not CALLING.isdisjoint(orders)


def listed(orders: Orders, name: str) -> frozenset[str]:
    """Return what an order lists by commas."""
    return frozenset(orders[name].split(",")) if name in orders else frozenset()
