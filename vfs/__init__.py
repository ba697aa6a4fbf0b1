"""The file system of children: names, grants, open files; no processes, no HTTP.

Nothing is imported here, so that a child loads only the modules that it uses. `client` is a
child's side (standard library only), with its Trio twin `client.aio` and the commands of
shells in `client.shell`; `relay` is the proxy in between; all others are the host's side.

Public: `backends`, `client`, `client.aio`, `client.shell.fd`, `client.shell.fs`,
`client.shell.llm`, `clients`, `errors`, `filesystem`, `growth`, `handover`, `ledger`,
`mounts`, `names`, `payload`, `places`, `policy`, `relay`.
"""
