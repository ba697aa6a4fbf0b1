"""ToolExec: tools run for a child over HTTP, output streamed, exit code sent.

    POST /exec -> connection -> protocol.toolexec.requests (checks) -> routes (which
               sidecar) -> executions (id, slot) -> execution (spawn, pump) -> output.log
               -> chunks (one reader) -> reply

``service`` is the host's service; ``server`` listens; ``connection`` serves one
request, with the shared parts in ``context``; ``executions``, ``execution`` and
``ending`` run and end tools; ``output`` keeps what they print, within a quota;
``routes`` chooses a sidecar. Start with ``docs/reference/toolexec.md``.

Public: ``handles``, ``kinds``, ``section``, ``service``, ``settings``, ``shim``,
``sidecar_section``, ``sidecars``.
"""
