"""Backends: how one model is run, one file each."""
