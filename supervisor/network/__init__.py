"""Names that a child may reach: rules, DNS, addresses, ClientHellos, the proxy's words.

Nothing here does I/O: bytes, names and clocks come in as arguments, and decisions, bytes
and texts go out. `rule` and `rules` say what is granted, `addresses` what no name may
stand for; `dns`, `clienthello` and `proxy` read what a child sends.
"""
