"""Batching: which inferences an instance executes together, and when."""
