"""Processes: the launchpad that forks and reaps, the launcher that asks it, restarts."""
