"""One client's conversation: bytes from its descriptors, replies back, in order.

Public: `client_events`, `counts`, `dispatch`, `door_socket`, `ports`,
`pump`, `replies`, `session`, `session_state`, `traffic`.
"""
