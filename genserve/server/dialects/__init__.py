"""Dialects: the APIs of text generation that clients speak."""
