"""The daemon: `sandhost serve`, its checks, its sweep, the service manager."""
