"""Sampling: what a request may ask of the decoding, read and checked before a model sees it."""
