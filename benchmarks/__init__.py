"""Measuring programs for the host's costs, with yardsticks and figures.

Not part of the product and not a test: nothing here fails because a machine is slow.
`python -m benchmarks` runs every program, `python -m benchmarks NAME` one of them;
`benchmarks/README.md` says how each measures and why so. Read on in
`benchmarks.measure` (how), `benchmarks.report` (what is printed) and `benchmarks.hosts`
(how the host under test is started).
"""
