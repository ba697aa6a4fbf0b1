"""LLM fds for the children of a host: who has which process, and what it may.

``service`` binds processes of ``vfs.content`` to clients; ``prompt`` says what a model is
told; ``toolloop`` and ``conversations`` let a model use the tools inside the host.
Imported only where a configuration asks for it.
"""
