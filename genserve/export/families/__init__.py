"""Families: a table for each class of architectures that the export builds graphs of."""

from __future__ import annotations

__all__: list[str] = []
