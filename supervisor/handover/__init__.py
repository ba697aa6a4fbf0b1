"""Replaces a host's program in place, while its children go on.

Public: `daemon`, `exchange`, `host_state`, `next_program`, `state`.
"""
