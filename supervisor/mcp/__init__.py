"""``sandhost mcp``: LLM fds, files and commands for programs that speak MCP alone.

``server`` answers a client; ``streams`` are stdin and stdout; ``tools`` are those of
``--files``: ``files`` and ``commands``.  Nothing is imported here.

Public: ``server``.
"""
