"""Tensor claim: what one config says of a tensor that several name."""

from __future__ import annotations

from dataclasses import dataclass

from genserve.config.model_config import ModelConfig, TensorSpec

__all__ = ["TensorClaim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClaim:
    """What the config of a model says of a tensor."""

    model: str
    data_type: str
    dims: tuple[int, ...]
    batches: bool

    @classmethod
    def of(cls, spec: TensorSpec, *, config: ModelConfig, dims: tuple[int, ...]) -> TensorClaim:
        """Return what a config says by one of its inputs or outputs, whose shape is `dims`."""
        return cls(
            model=config.name, data_type=spec.data_type, dims=dims, batches=config.max_batch_size > 0
        )

    @property
    def full_dims(self) -> tuple[int, ...]:
        """The shape with that of the batch."""
        return (-1, *self.dims) if self.batches else self.dims

    def conflict(self, other: TensorClaim) -> str:
        """Return in which both contradict each other, in Triton's words; empty: they do not."""
        if "TYPE_INVALID" in (self.data_type, other.data_type) or not (self.dims and other.dims):
            return ""  # left to the model's file
        if self.data_type != other.data_type:
            return (
                f"inconsistent data type: {self.data_type} is inferred from model {self.model} while "
                f"{other.data_type} is inferred from model {other.model}"
            )
        if not _fit(self.dims, other.dims) and not _fit(self.full_dims, other.full_dims):
            return (
                f"inconsistent shape: {_list(self.full_dims)} is inferred from model {self.model} while "
                f"{_list(other.full_dims)} is inferred from model {other.model}"
            )
        return ""


def _fit(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _list(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
