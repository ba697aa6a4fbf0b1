"""Reports of a host over HTTP: metrics, health, and a status page."""
