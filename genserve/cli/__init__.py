"""CLI: the command line."""
