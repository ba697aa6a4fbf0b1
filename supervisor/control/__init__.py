"""The control socket: questions, orders and streams, on both of its ends.

Public: `bases`, `blockers`, `client`, `fleet`, `lines`, `networks`, `orders`,
`server`, `streams`.
"""
