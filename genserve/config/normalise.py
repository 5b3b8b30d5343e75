"""Normalise: the defaults of a config that follow from its other fields, and from the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genserve.config.backends import deduce_backend
from genserve.config.diagnostics import Diagnostic, Severity

# A folder for each GPU; asking CUDA would import torch.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES makes visible to this process."""
    present = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, sum(device not in ("", "-1") for device in visible.split(",")))


def normalise(
    message: Any, *, model_folder: Path, gpus: int = 0, strict_placement: bool = False
) -> tuple[Diagnostic, ...]:
    """Fill in the defaults that Triton fills in at load; to be called after the backend has completed it.

    A logits stage that cannot run on its GPU: see repository/config_resolution.py.

    Args:
        message: the `inference.ModelConfig`, changed in place.
        model_folder: its name is the model's.
        gpus: number of GPUs; their ids begin with 0.
        strict_placement: reject a group whose GPUs are missing, instead of running it on the CPU.

    Returns:
        The instance groups that do not run where the config places them: warnings, or errors with
        `strict_placement`.

    Raises:
        RepositoryError: the backend cannot be deduced.
    """
    message.name = message.name or model_folder.name
    deduce_backend(message, model_folder)
    if not message.HasField("version_policy"):
        message.version_policy.latest.num_versions = 1
    _batching(message)
    if message.platform == "ensemble":
        message.model_transaction_policy.SetInParent()
        return ()
    for memory in ("input_pinned_memory", "output_pinned_memory"):
        if not message.optimization.HasField(memory):
            getattr(message.optimization, memory).enable = True
    _instance_groups(message, gpus=gpus)
    severity = Severity.ERROR if strict_placement else Severity.WARNING
    source = model_folder / "config.pbtxt"
    return tuple(_missing_gpus(message, gpus=gpus, severity=severity, source=source))


def _batching(message: Any) -> None:
    sizes = [message.max_batch_size] if message.max_batch_size > 0 else []
    if message.HasField("dynamic_batching") and not message.dynamic_batching.preferred_batch_size:
        message.dynamic_batching.preferred_batch_size.extend(sizes)
    if message.HasField("sequence_batching"):
        batching = message.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or 1_000_000
        if batching.HasField("oldest") and not batching.oldest.preferred_batch_size:
            batching.oldest.preferred_batch_size.extend(sizes)


def _instance_groups(message: Any, *, gpus: int) -> None:
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        group.count = max(1, group.count)
        if group.kind == group.KIND_AUTO:
            all_there = gpus > 0 and all(gpu < gpus for gpu in group.gpus)
            group.kind = group.KIND_GPU if all_there else group.KIND_CPU
            if not all_there:
                del group.gpus[:]
        if group.kind == group.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))


def renumber_gpus(message: Any) -> None:
    """Number the GPUs of a config from 0, in their order: a cluster gives a replica as many, of any machine.

    Args:
        message: the `inference.ModelConfig`, changed in place.
    """
    named = sorted({gpu for group in message.instance_group for gpu in group.gpus})
    for group in message.instance_group:
        group.gpus[:] = [named.index(gpu) for gpu in group.gpus]


def _missing_gpus(message: Any, *, gpus: int, severity: Severity, source: Path) -> Iterator[Diagnostic]:
    """Yield the missing GPUs of the groups, and remove them from the groups."""
    for group in message.instance_group:
        missing = [gpu for gpu in group.gpus if gpu >= gpus]
        if group.kind != group.KIND_GPU or (group.gpus and not missing):
            continue
        there = [gpu for gpu in group.gpus if gpu < gpus]
        del group.gpus[:]
        group.gpus.extend(there)
        if not there:
            group.kind = group.KIND_CPU
        yield Diagnostic(
            severity=severity,
            path=source,
            message=f"instance group {group.name} of model {message.name} {_lack(missing, gpus=gpus)}",
            remedy=_remedy(there, severity=severity),
        )


def _lack(missing: list[int], *, gpus: int) -> str:
    if not gpus:
        return "has kind KIND_GPU but no GPUs are available"
    there = ", ".join(map(str, range(gpus)))
    return f"specifies invalid or unsupported gpu id {missing[0]}. Available GPUs: {there}"


def _remedy(there: list[int], *, severity: Severity) -> str:
    if severity is Severity.ERROR:
        return "write `kind: KIND_AUTO`, which allows any device, or serve without --strict-placement"
    place = f"on the GPUs {there}" if there else "on the CPU"
    return f"it runs {place}; `--strict-placement` rejects the model, `kind: KIND_AUTO` allows any device"
