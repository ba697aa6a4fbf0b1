"""Children on many machines: their nodes, leases and quotas.

`directory` decides for the fleet, `node` for one machine; `lease`, `placement`, `slices`
and `held_slices` are what they decide by, `states` the tables, `messages` what travels
between them, `link` its frames. None of these does I/O: clocks and ids come in as
arguments, changes to be stored and messages to be sent go out (`step`). `store` opens
files, `postgres_store` the database that `store_address` names.

Public: `clocks`, `directory`, `fence`, `held_slices`, `lease`, `link`, `listings`,
`messages`, `node`, `postgres_store`, `slices`, `states`, `step`, `store`,
`store_address`.
"""
