"""Bench: measures running servers: prompts, dialects, the load generator and its figures."""
