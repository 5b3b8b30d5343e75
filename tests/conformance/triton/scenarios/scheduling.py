"""Scheduling: batches, queues, priorities, sequences and iterations."""

from __future__ import annotations

from typing import Any

from tests.conformance.triton.exchange import Topic
from tests.conformance.triton.scenarios.asking import (
    generate_stream,
    grpc_infer,
    infer,
    message,
    stream,
    talk,
    tensor,
    together,
)

__all__ = ["TOPICS"]


def _sleeping(model: str, ms: int = 0, *, rows: int = 1, width: int = 1, **parameters: Any) -> dict:
    extra = {"parameters": parameters} if parameters else {}
    return infer(model, tensor("SLEEP_MS", "INT32", [rows, width], [ms] * rows * width), **extra)


def _turns(model: str, *later: tuple[int, dict], busy_ms: int = 700) -> list:
    """Requests that arrive while the only instance is busy."""
    return together((0, _sleeping(model, busy_ms)), *later)


_BATCHING = Topic(
    name="batching",
    run="all",
    exchanges=(
        talk("alone", _sleeping("batcher"), counted=("batcher",)),
        talk(
            "what_waits_is_one_batch",
            _turns("batcher", *((150 + 50 * i, _sleeping("batcher")) for i in range(3))),
            counted=("batcher",),
        ),
        talk(
            "not_more_than_max_batch_size",
            _turns("batcher", *((150 + 50 * i, _sleeping("batcher", rows=2)) for i in range(3))),
            counted=("batcher",),
        ),
        talk(
            "another_shape_ends_a_batch",
            _turns(
                "batcher",
                (150, _sleeping("batcher")),
                (200, _sleeping("batcher")),
                (250, _sleeping("batcher", width=2)),
                (300, _sleeping("batcher")),
            ),
            counted=("batcher",),
        ),
        talk(
            "other_parameters_share_a_batch",
            _turns("batcher", (150, _sleeping("batcher", colour="red")), (200, _sleeping("batcher"))),
        ),
        talk(
            "ragged_shapes_share_a_batch",
            _turns("ragged", (150, _sleeping("ragged", width=2)), (200, _sleeping("ragged", width=3))),
            counted=("ragged",),
        ),
        talk(
            "preferred_size_leaves_before_the_delay",
            together((0, _sleeping("batcher_preferred")), (60, _sleeping("batcher_preferred"))),
            counted=("batcher_preferred",),
        ),
        talk("one_leaves_after_the_delay", _sleeping("batcher_preferred"), counted=("batcher_preferred",)),
        talk(
            "larger_than_preferred_leaves_alone",
            together(
                (0, _sleeping("batcher_preferred", rows=3)), (50, _sleeping("batcher_preferred", rows=3))
            ),
            counted=("batcher_preferred",),
        ),
        talk(
            "default_scheduler_takes_one_after_the_other",
            together(*((0, infer("pass", tensor("X", "INT32", [1], [7]))) for _ in range(3))),
            counted=("pass",),
        ),
        talk(
            "priority_and_timeout_without_a_queue_policy",
            infer("pass", tensor("X", "INT32", [1], [7]), parameters={"priority": 9, "timeout": 1}),
        ),
    ),
)

_QUEUES = Topic(
    name="queues",
    run="all",
    exchanges=(
        talk(
            "full_queue_refuses",
            _turns("queue_limited", *((150 + 60 * i, _sleeping("queue_limited")) for i in range(3))),
            counted=("queue_limited",),
        ),
        talk(
            "full_queue_refuses_with_id",
            _turns(
                "queue_limited",
                (150, _sleeping("queue_limited")),
                (210, _sleeping("queue_limited")),
                (270, infer("queue_limited", tensor("SLEEP_MS", "INT32", [1, 1], [0]), id="late")),
            ),
        ),
        talk(
            "full_queue_refuses_over_grpc",
            _turns(
                "queue_limited",
                (150, _sleeping("queue_limited")),
                (210, _sleeping("queue_limited")),
                (270, grpc_infer("queue_limited", tensor("SLEEP_MS", "INT32", [1, 1], [0]))),
            ),
        ),
        talk(
            "waited_too_long",
            _turns("queue_timed", (150, _sleeping("queue_timed")), busy_ms=1800),
            counted=("queue_timed",),
        ),
        talk("does_not_wait_while_the_instance_is_free", _sleeping("queue_timed")),
        talk(
            "a_request_may_ask_for_a_shorter_wait",
            _turns("queue_timed", (150, _sleeping("queue_timed", timeout=1000)), busy_ms=300),
            counted=("queue_timed",),
        ),
        talk(
            "a_request_may_not_ask_for_a_longer_wait",
            _turns("queue_timed", (150, _sleeping("queue_timed", timeout=9000000)), busy_ms=1800),
        ),
        talk(
            "delayed_not_refused",
            _turns(
                "queue_delayed",
                (100, _sleeping("queue_delayed")),
            ),
            counted=("queue_delayed",),
        ),
        talk(
            "higher_priority_first",
            _turns(
                "prioritized",
                (100, _sleeping("prioritized", priority=3)),
                (200, _sleeping("prioritized", priority=2)),
                (300, _sleeping("prioritized", priority=1)),
            ),
            counted=("prioritized",),
        ),
        talk(
            "no_priority_and_a_wrong_one_are_the_default",
            _turns(
                "prioritized",
                (100, _sleeping("prioritized", priority=3)),
                (200, _sleeping("prioritized")),
                (300, _sleeping("prioritized", priority=7)),
                (400, _sleeping("prioritized", priority=1)),
            ),
        ),
        talk(
            "a_level_has_its_own_limit",
            _turns(
                "prioritized",
                (100, _sleeping("prioritized", priority=3)),
                (200, _sleeping("prioritized", priority=3)),
                (300, _sleeping("prioritized", priority=1)),
            ),
        ),
    ),
)


def _sequence(model: str, value: int, sequence: Any, *flags: str, rows: int = 1) -> dict:
    parameters = {"sequence_id": sequence} | {f"sequence_{flag}": True for flag in flags}
    shape = [rows, 1] if model != "sequence_idle" else [1]
    return infer(model, tensor("X", "INT32", shape, [value] * rows), parameters=parameters)


def _grpc_sequence(value: int, **parameters: dict) -> dict:
    return grpc_infer("sequence_oldest", tensor("X", "INT32", [1, 1], [value]), parameters=parameters)


_SEQUENCES = Topic(
    name="sequences",
    run="all",
    exchanges=(
        *(
            talk(
                f"{kind}_from_start_to_end",
                _sequence(f"sequence_{kind}", 1, 11, "start"),
                _sequence(f"sequence_{kind}", 2, 11),
                _sequence(f"sequence_{kind}", 3, 11, "end"),
                counted=(f"sequence_{kind}",) if kind == "oldest" else (),
            )
            for kind in ("direct", "oldest")
        ),
        talk("start_and_end_at_once", _sequence("sequence_oldest", 5, 12, "start", "end")),
        talk(
            "two_in_turns",
            _sequence("sequence_direct", 1, 13, "start"),
            _sequence("sequence_direct", 10, 14, "start"),
            _sequence("sequence_direct", 2, 13),
            _sequence("sequence_direct", 20, 14),
            _sequence("sequence_direct", 3, 13, "end"),
            _sequence("sequence_direct", 30, 14, "end"),
        ),
        talk(
            "string_ids",
            _sequence("sequence_oldest", 1, "ann", "start"),
            _sequence("sequence_oldest", 2, "ann", "end"),
        ),
        talk("large_id", _sequence("sequence_oldest", 1, 18446744073709551615, "start", "end")),
        *(
            talk(f"{kind}_without_id", infer(f"sequence_{kind}", tensor("X", "INT32", [1, 1], [1])))
            for kind in ("direct", "oldest")
        ),
        talk("id_of_zero", _sequence("sequence_oldest", 1, 0, "start")),
        talk("empty_id", _sequence("sequence_oldest", 1, "", "start")),
        *(
            talk(f"{kind}_without_start", _sequence(f"sequence_{kind}", 1, 99), counted=(f"sequence_{kind}",))
            for kind in ("direct", "oldest")
        ),
        talk("string_id_without_start", _sequence("sequence_oldest", 1, "bob")),
        talk(
            "after_its_end",
            _sequence("sequence_oldest", 1, 15, "start", "end"),
            _sequence("sequence_oldest", 1, 15),
        ),
        talk(
            "started_again",
            _sequence("sequence_oldest", 1, 16, "start"),
            _sequence("sequence_oldest", 5, 16, "start"),
            _sequence("sequence_oldest", 1, 16, "end"),
        ),
        talk("batch_of_two", _sequence("sequence_oldest", 1, 17, "start", "end", rows=2)),
        talk(
            "idle_too_long",
            together(
                (0, _sequence("sequence_idle", 1, 18, "start")), (1500, _sequence("sequence_idle", 2, 18))
            ),
        ),
        talk(
            "a_third_waits_for_a_free_slot",
            _sequence("sequence_direct", 1, 21, "start"),
            _sequence("sequence_direct", 1, 22, "start"),
            together(
                (0, _sequence("sequence_direct", 7, 23, "start", "end")),
                (300, _sequence("sequence_direct", 2, 21, "end")),
            ),
            _sequence("sequence_direct", 2, 22, "end"),
        ),
        talk(
            "grpc",
            _grpc_sequence(1, sequence_id={"int64_param": 31}, sequence_start={"bool_param": True}),
            _grpc_sequence(2, sequence_id={"int64_param": 31}, sequence_end={"bool_param": True}),
        ),
        talk(
            "grpc_string_id",
            _grpc_sequence(1, sequence_id={"string_param": "eve"}, sequence_start={"bool_param": True}),
            _grpc_sequence(2, sequence_id={"string_param": "eve"}, sequence_end={"bool_param": True}),
        ),
        talk("grpc_without_start", _grpc_sequence(1, sequence_id={"int64_param": 32})),
        talk(
            "on_one_stream",
            stream(
                *(
                    message(
                        "sequence_oldest",
                        tensor("X", "INT32", [1, 1], [value]),
                        id=str(value),
                        parameters={
                            "sequence_id": {"int64_param": 33},
                            "sequence_start": {"bool_param": value == 1},
                            "sequence_end": {"bool_param": value == 3},
                        },
                    )
                    for value in (1, 2, 3)
                )
            ),
        ),
    ),
)

_ITERATIONS = Topic(
    name="iterations",
    run="all",
    exchanges=(
        talk(
            "three",
            stream(message("iterative", tensor("N", "INT32", [1, 1], [3]), id="i")),
            counted=("iterative",),
        ),
        talk("one", stream(message("iterative", tensor("N", "INT32", [1, 1], [1])))),
        talk("as_events", generate_stream("iterative", {"N": 2})),
    ),
)

TOPICS = (_BATCHING, _QUEUES, _SEQUENCES, _ITERATIONS)
