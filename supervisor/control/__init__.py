"""The control socket: questions, orders and streams, on both of its ends."""
