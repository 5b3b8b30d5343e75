"""Residents: what sits in the slots of the KV cache."""

from __future__ import annotations

from typing import TypeAlias

from genserve.generation.beam import Beam
from genserve.generation.logits_request import LogitsRequest
from genserve.generation.parked import Parked
from genserve.generation.token_sequence import TokenSequence

__all__ = ["Occupant", "Resident"]

Occupant: TypeAlias = TokenSequence | LogitsRequest | Beam      # has something to compute
Resident: TypeAlias = Occupant | Parked
