"""Observe: logs, metrics and spans of a server."""
