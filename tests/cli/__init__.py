"""Tests of genserve.cli."""
