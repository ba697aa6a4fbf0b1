"""The launchpad: a small process, stdlib only, that forks and ends children."""
