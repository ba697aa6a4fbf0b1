"""Processes: the launchpad that forks and reaps, the launcher, restarts."""
