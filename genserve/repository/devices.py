"""Devices: how many GPUs this process may use."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["num_gpus"]

# A folder for each GPU; to ask CUDA itself would take an import of torch.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def num_gpus() -> int:
    """Return how many NVIDIA GPUs are here, of those that CUDA_VISIBLE_DEVICES lets this process see."""
    present = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(device not in ("", "-1") for device in visible.split(",")))
