"""Tests of genserve.client."""
