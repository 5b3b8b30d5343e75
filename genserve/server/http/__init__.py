"""HTTP: connections, bodies and event streams."""
