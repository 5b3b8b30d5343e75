"""Byte size: an amount of memory as people write it, "2GiB"."""

from __future__ import annotations

import re

__all__ = ["byte_size"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_size(text: str) -> int | None:
    """Return the bytes of a text such as `2GiB`, `1.5 GB` or `1048576`; None: it is not one."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    return None if match is None or unit is None else int(float(match[1]) * unit)
