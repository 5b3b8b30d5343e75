"""Benchmarks of running servers: prompts, dialects, the load, and what it measures."""
