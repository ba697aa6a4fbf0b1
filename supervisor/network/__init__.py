"""Names that a child may reach: rules, DNS, addresses, ClientHellos, the proxy's words.

What decides and parses does no I/O: bytes, names and clocks come in, and decisions, bytes
and texts go out. `rule` and `rules` say what is granted, `addresses` what no name may
stand for; `dns`, `clienthello` and `proxy` read what a child sends.
"""
