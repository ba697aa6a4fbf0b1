"""What a host tells of itself over HTTP: metrics, health, and a status page."""
