"""Python backend: a repository's model.py, run as it stands."""
