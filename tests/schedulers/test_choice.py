from __future__ import annotations

import pytest

from genserve.config.model_config import DynamicBatching, ModelConfig, OldestStrategy, SequenceBatching
from genserve.inference import RequestFlags
from genserve.schedulers.queue_scheduler import make_scheduler
from tests.schedulers.inferences import Asked

ITS_SEQUENCE = {"correlation_id": 1, "flags": RequestFlags.SEQUENCE_START}


@pytest.mark.parametrize(
    ("config", "asked", "num_together"),
    [
        ({}, {}, 1),
        ({"dynamic_batching": DynamicBatching()}, {}, 3),
        ({"sequence_batching": SequenceBatching()}, ITS_SEQUENCE, 1),
        ({"sequence_batching": SequenceBatching(strategy=OldestStrategy(), iterative=True)}, {}, 3),
    ],
    ids=["direct", "dynamic", "sequences", "iterative"],
)
def test_the_config_says_how_many_requests_run_together(tmp_path, config, asked, num_together):
    scheduler = make_scheduler(
        ModelConfig(name="m", max_batch_size=4, **config), num_instances=1, path=tmp_path
    )
    for _ in range(3):
        scheduler.submit(Asked(**asked).inference)
    assert scheduler.num_waiting == 3
    assert len(scheduler.take(0)) == num_together
