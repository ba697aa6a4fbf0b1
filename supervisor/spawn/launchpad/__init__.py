"""The launchpad: a small process, stdlib only, that forks and ends the children of a host."""
