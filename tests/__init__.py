"""Tests of genserve."""
