"""Structured output: compiles grammars, and computes which tokens they allow next."""
