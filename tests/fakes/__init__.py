"""Fakes: small working classes that stand in for the heavy ones."""
