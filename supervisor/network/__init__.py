"""The network by name: rules, DNS, addresses, ClientHellos, the proxy.

Modules that decide and parse do no I/O: they take bytes, names and clocks, and return
decisions, bytes and texts. `rule` and `rules` have the grants, `addresses` the closed
ranges; `dns`, `clienthello`, `proxy_http` and `proxy_socks` read the bytes of a child.

Public: `child_network`, `credential`, `credential_file`, `own_addresses`, `reasons`,
`rule`, `section`, `service`, `settings`, `statistics`.
"""
