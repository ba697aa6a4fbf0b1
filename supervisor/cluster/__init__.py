"""The fleet's processes on Ray: directory actor, node actors, doors.

`directory_service` and `node_service` run in the actors and know nothing of Ray;
`ray_adapter` alone does. `door` is what commands speak to; `ray_processes` starts and
ends Ray on this machine, without importing it; `setup` is the program between them.
`fleet_child` is a child in the hand of a Python program, which speaks to the door, too;
`ray_sandbox` has it behind Ray's own interface.

Public: `admission`, `client`, `command_server`, `commands`, `fleet_child`, `names`,
`peers`, `ray_processes`, `ray_sandbox`, `signals`.
"""
