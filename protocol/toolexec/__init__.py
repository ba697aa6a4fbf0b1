"""ToolExec on the wire: requests, their heads, bodies, forms and tokens; no I/O."""
