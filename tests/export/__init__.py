"""Tests of genserve.export."""
