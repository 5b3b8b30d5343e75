"""Stands in for a module of Triton's build that measures the shared memory of stubs; genserve has none."""
