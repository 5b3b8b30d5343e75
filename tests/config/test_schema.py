"""Messages of Triton's schema as frozen values."""

from __future__ import annotations

from google.protobuf import text_format

from genserve.config.model_config import (
    AllVersions,
    BatchInput,
    BatchOutput,
    Control,
    DirectStrategy,
    DynamicBatching,
    InitialState,
    InstanceGroup,
    ModelConfig,
    OldestStrategy,
    QueuePolicy,
    Resource,
    ResourceClaim,
    SequenceBatching,
    StateSpec,
    TensorSpec,
    WarmupInput,
    WarmupSample,
)
from genserve.config.schema import model_config, new_model_config


def read(text: str) -> ModelConfig:
    return model_config(text_format.Parse(text, new_model_config()), name="m")


def test_a_message_is_kept_and_an_empty_one_has_triton_s_defaults():
    message = new_model_config()
    config = model_config(message, name="m")
    assert config.message is message
    assert config == ModelConfig(name="m")


def test_tensors_with_all_fields():
    config = read("""
        input { name: "a" data_type: TYPE_BF16 dims: [ 4, -1 ] reshape { shape: [ 2, 2, -1 ] }
                allow_ragged_batch: true optional: true }
        input { name: "s" data_type: TYPE_STRING dims: 1 reshape { } }
        output { name: "y" data_type: TYPE_BOOL dims: 2 label_filename: "labels.txt" }
        batch_input { kind: BATCH_ITEM_SHAPE target_name: "n" data_type: TYPE_FP32 source_input: "a" }
        batch_output { target_name: [ "y", "z" ] kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "a" }
    """)
    assert config.inputs == (
        TensorSpec(name="a", data_type="TYPE_BF16", dims=(4, -1), reshape=(2, 2, -1), optional=True,
                   allow_ragged_batch=True),
        TensorSpec(name="s", data_type="TYPE_STRING", dims=(1,), reshape=()),
    )  # fmt: skip
    assert config.output("y") == TensorSpec(
        name="y", data_type="TYPE_BOOL", dims=(2,), label_filename="labels.txt"
    )
    assert config.batch_inputs == (
        BatchInput(
            kind="BATCH_ITEM_SHAPE", target_names=("n",), source_inputs=("a",), data_type="TYPE_FP32"
        ),
    )
    assert config.batch_outputs == (
        BatchOutput(kind="BATCH_SCATTER_WITH_INPUT_SHAPE", target_names=("y", "z"), source_inputs=("a",)),
    )


def test_dynamic_batching_with_queue_policies():
    config = read("""
        dynamic_batching {
          preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 preserve_ordering: true
          priority_levels: 2 default_priority_level: 1
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 max_queue_size: 3 }
          priority_queue_policy { key: 2 value { allow_timeout_override: true } }
        }
    """)
    assert config.dynamic_batching == DynamicBatching(
        preferred_batch_sizes=(4, 8),
        max_queue_delay_us=100,
        preserve_ordering=True,
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=QueuePolicy(delays=True, default_timeout_us=5, max_queue_size=3),
        priority_queue_policy={2: QueuePolicy(allow_timeout_override=True)},
    )
    assert read("dynamic_batching { }").dynamic_batching == DynamicBatching()


def test_sequences_with_controls_and_states():
    batching = read("""
        sequence_batching {
          direct { max_queue_delay_microseconds: 7 minimum_slot_utilization: 0.5 }
          control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 2.5 ] }
                                    control { kind: CONTROL_SEQUENCE_END bool_false_true: [ true, false ] } }
          control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
          state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: [ -1 ]
                  initial_state { name: "x" data_type: TYPE_FP32 dims: 1 data_file: "f" } }
        }
    """).sequence_batching
    assert batching == SequenceBatching(
        strategy=DirectStrategy(max_queue_delay_us=7, minimum_slot_utilization=0.5),
        max_sequence_idle_us=1_000_000,
        controls=(
            Control(name="S", kind="CONTROL_SEQUENCE_START", data_type="TYPE_FP32", false_true=(0, 2.5)),
            Control(name="S", kind="CONTROL_SEQUENCE_END", data_type="TYPE_BOOL", false_true=(1, 0)),
            Control(name="ID", kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_STRING"),
        ),
        states=(
            StateSpec(
                input_name="i",
                output_name="o",
                data_type="TYPE_FP32",
                dims=(-1,),
                initial_state=InitialState(data_type="TYPE_FP32", dims=(1,), data_file="f"),
            ),
        ),
    )


def test_sequences_with_the_oldest_strategy():
    batching = read("""
        sequence_batching {
          max_sequence_idle_microseconds: 9 iterative_sequence: true
          oldest { max_candidate_sequences: 3 preferred_batch_size: 2 preserve_ordering: true }
        }
    """).sequence_batching
    strategy = OldestStrategy(max_candidate_sequences=3, preferred_batch_sizes=(2,), preserve_ordering=True)
    assert batching == SequenceBatching(strategy=strategy, max_sequence_idle_us=9, iterative=True)


def test_instance_groups_warmups_and_other_fields():
    config = read("""
        version_policy { }
        response_cache { enable: true }
        metric_tags { key: "team" value: "blue" }
        instance_group { name: "g" kind: KIND_GPU count: 2 gpus: [ 0, 1 ]
          rate_limiter { resources { name: "R" count: 4 } resources { name: "G" global: true count: 1 }
                         priority: 2 } }
        instance_group { }
        model_warmup { name: "w" batch_size: 1
          inputs { key: "a" value { data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "raw" } } }
    """)
    assert config.version_policy == AllVersions()
    assert config.response_cache
    assert config.metric_tags == {"team": "blue"}
    resources = (
        Resource(name="R", count=4, is_global=False),
        Resource(name="G", count=1, is_global=True),
    )
    assert config.instance_groups == (
        InstanceGroup(
            name="g", kind="KIND_GPU", count=2, gpus=(0, 1),
            rate_limiter=ResourceClaim(resources=resources, priority=2),
        ),
        InstanceGroup(name="", kind="KIND_AUTO"),
    )  # fmt: skip
    data = WarmupInput(
        name="a", data_type="TYPE_FP32", dims=(4,), source="input_data_file", data_file="raw"
    )
    assert config.warmups == (WarmupSample(name="w", batch_size=1, count=1, inputs=(data,)),)
