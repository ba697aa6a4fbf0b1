"""A stand-in for a model provider: real HTTP on loopback, no model.

    python -m demo.provider [--port N] [--key K] [--log FILE] [--script FILE]

It speaks Chat Completions, Responses and Messages, plain and streamed, embeddings and
the list of models. The demo, the tests and the benchmarks use it. Words in the last
message that begin with ``!`` tell it how to behave (`ORDERS`; `Provider.orders` for all
requests); else it says how many words the message has. It notes each request, and what
it counted for it (`Served`). Tokens are those of `question.py`.
"""

from demo.provider.line import Line
from demo.provider.orders import ORDERS
from demo.provider.served import Served, Tokens
from demo.provider.server import Provider, serving

__all__ = ["ORDERS", "Line", "Provider", "Served", "Tokens", "serving"]
