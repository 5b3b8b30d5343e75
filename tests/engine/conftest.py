from __future__ import annotations

import pytest

from genserve.engine.admission_control import QueueLimits
from tests.fakes.engines import GatedLogits, engine_thread
from tests.fakes.logits import PagedLogits


@pytest.fixture
def engine():
    engine = engine_thread(PagedLogits())
    yield engine
    engine.close()


@pytest.fixture
def gated():
    model = GatedLogits(max_num_seqs=2)
    engine = engine_thread(model, limits=QueueLimits(max_requests=1))
    yield model, engine
    model.open_gate()
    engine.close()
