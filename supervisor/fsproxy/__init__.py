"""FD 3 served: one pump, a session for each client, a table of handlers.

`pump` finds the clients that ask, `session` answers one of them, `dispatch` names the handler
of each request; `ports` is what services and children see of a session.

Public: `client_events`, `counts`, `dispatch`, `door_socket`, `ports`,
`pump`, `replies`, `session`, `session_state`, `traffic`.
"""
