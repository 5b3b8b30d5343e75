"""Metrics text: the body of `/metrics`, with the metrics of text generation under vLLM's names too.

The numbers are kept once. Dashboards, alerts and inference gateways that were made for vLLM find them under
its names and labels. Only metrics with the same meaning have such a name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from genserve.completion import FinishReason

# vLLM's names of genserve's families, without the `_total` of counters: vllm/v1/metrics/loggers.py.
VLLM_NAMES: Mapping[str, str] = {
    f"genserve_{ours}": f"vllm:{theirs}"
    for ours, theirs in (
        *((name, name) for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "num_preemptions",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
        )),
        ("iteration_tokens", "iteration_tokens_total"),     # a histogram, whatever the name says
    )
}
# vLLM's `finished_reason`, by how an answer ended.
VLLM_REASONS: Mapping[str, str] = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: "repetition",
    "cancelled": "abort",
    "failed": "error",
}
_SPECIAL = re.compile(r'[\\\n"]')


def metrics_text(registry: CollectorRegistry) -> bytes:
    """Return all metrics in Prometheus' text format 1.0.0.

    prometheus_client takes four times as long for a line, and inference gateways scrape 20 times a second. As
    Prometheus ignores the times at which counters were created, they are left out.
    """
    families = {family.name: family for family in registry.collect()}
    texts: list[str] = []
    for name, family in families.items():
        text = _family_text(family)
        texts.append(text)
        if name in VLLM_NAMES:
            texts.append(_renamed(text, name, VLLM_NAMES[name]))
    texts += map(_family_text, _counted_otherwise(families))
    return "".join(texts).encode()


def _family_text(family: Metric) -> str:
    created = f"{family.name}_created"
    name = family.name + "_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"]
    for sample in family.samples:
        if sample.name == created:
            continue
        labels = ",".join([f'{key}="{_escaped(value)}"' for key, value in sorted(sample.labels.items())])
        lines.append(f"{sample.name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}\n")
    return "".join(lines)


def _renamed(text: str, ours: str, theirs: str) -> str:
    """Return the text of a family under vLLM's name and with its labels; only our own names begin a line."""
    text = text.replace(f"\n{ours}", f"\n{theirs}").replace(f" {ours}", f" {theirs}")
    for before in "{,":
        text = text.replace(f'{before}model="', f'{before}engine="0",model_name="')
    return text


def _counted_otherwise(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield the families of vLLM that count what ours do by other labels, or are a sum of ours."""
    by_reason: defaultdict[tuple[str, str], float] = defaultdict(float)
    for labels, value in _samples(families, "requests"):
        by_reason[labels["model"], VLLM_REASONS[labels["ending"]]] += value
    success = Metric("vllm:request_success", "Count of processed requests.", "counter")
    for (model, reason), value in by_reason.items():
        labels = _labels(model) | {"finished_reason": reason}
        success.add_sample("vllm:request_success_total", labels, value)
    yield success
    hits = {labels["model"]: value for labels, value in _samples(families, "prefix_cache_hits")}
    prompts = Metric("vllm:prompt_tokens", "Prompt tokens, with those found in the prefix cache.", "counter")
    sources = Metric("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "counter")
    for labels, value in _samples(families, "prefix_cache_queries"):
        model = labels["model"]
        prompts.add_sample("vllm:prompt_tokens_total", _labels(model), value)
        for source, part in {"local_compute": value - hits[model], "local_cache_hit": hits[model]}.items():
            labels = _labels(model) | {"source": source}
            sources.add_sample("vllm:prompt_tokens_by_source_total", labels, part)
    yield from (prompts, sources)
    cache = Metric("vllm:cache_config_info", "Size of the KV cache, in its labels.", "gauge")
    num_blocks = {labels["model"]: value for labels, value in _samples(families, "kv_cache_num_blocks")}
    for labels, value in _samples(families, "kv_cache_block_size"):
        size = {"block_size": f"{value:.0f}", "num_gpu_blocks": f"{num_blocks[labels['model']]:.0f}"}
        cache.add_sample("vllm:cache_config_info", _labels(labels["model"]) | size, 1)
    yield cache


def _samples(families: Mapping[str, Metric], name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and values of one of our gauges or counters."""
    for sample in families[f"genserve_{name}"].samples:
        if sample.name != f"genserve_{name}_created":
            yield sample.labels, sample.value


def _labels(model: str) -> dict[str, str]:
    return {"engine": "0", "model_name": model}


def _escaped(value: str) -> str:
    if _SPECIAL.search(value) is None:
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)
