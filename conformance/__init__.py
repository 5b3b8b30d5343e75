"""Conformance: real clients of many libraries against a running server, see docs/conformance.md."""
