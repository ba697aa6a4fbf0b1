"""The control socket: questions, orders and streams, on both of its ends.

Public: `bases`, `blockers`, `client`, `fleet`, `networks`, `orders`, `server`,
`streams`.
"""
