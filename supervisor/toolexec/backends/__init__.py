"""Where sidecars run: on this machine, or in a container."""
