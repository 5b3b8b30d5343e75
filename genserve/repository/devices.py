"""Devices: how many GPUs this process may use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["num_gpus"]

_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU; asking CUDA itself would take torch's import


def num_gpus() -> int:
    """Return how many NVIDIA GPUs are here, of those that CUDA_VISIBLE_DEVICES lets this process see."""
    present = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(device not in ("", "-1") for device in visible.split(",")))
