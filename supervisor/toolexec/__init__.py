"""ToolExec: tools run for a child over HTTP, every byte streamed, the exit code told.

    POST /exec -> connection -> protocol.toolexec.requests (checks) -> routes (which sidecar)
               -> executions (id, slot) -> execution (spawn, pump) -> outputlog
               -> chunks (one reader) -> reply

``service`` is what a host plugs in; ``server`` listens; ``connection`` serves one
request, with what all share in ``context``; ``executions``, ``execution`` and ``ending``
run and end tools; ``log`` keeps what they print, in ``stores``, within a
``quota``; ``routes`` is the seam to the sidecars.  Start with ``docs/reference/toolexec.md``.
"""
