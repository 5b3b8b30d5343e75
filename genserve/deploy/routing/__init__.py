"""Routing: which replica gets a request."""
