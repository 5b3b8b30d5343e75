"""Repository: which models there are, and which are loaded."""
