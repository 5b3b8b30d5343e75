"""Encoders: models of vectors and scores of texts."""
