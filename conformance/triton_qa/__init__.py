"""Triton's own qa scripts, with genserve in the place of tritonserver."""
