"""Runtimes: the classes that compute the logits of a text model, and the memory of their KV caches."""
