"""Metrics text: the body of `/metrics`, with the metrics of text generation under vLLM's names too.

The numbers are kept once. Dashboards, alerts and inference gateways that were made for vLLM find them under
its names and labels. Only metrics with the same meaning have such a name.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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
            "external_prefix_cache_queries",
            "external_prefix_cache_hits",
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
        ("requests", "request_success"),
        ("iteration_tokens", "iteration_tokens_total"),     # a histogram, whatever the name says
    )
}
_Labels: TypeAlias = tuple[tuple[str, str], ...]
_SPECIAL = re.compile(r'[\\\n"]')


def metrics_text(registry: Collector) -> bytes:
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
    hits = dict(_samples(families, "prefix_cache_hits"))
    prompts = Metric("vllm:prompt_tokens", "Prompt tokens, with those found in the prefix cache.", "counter")
    sources = Metric("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "counter")
    for labels, value in _samples(families, "prefix_cache_queries"):
        prompts.add_sample("vllm:prompt_tokens_total", _renamed_labels(labels), value)
        num_hits = hits[labels]
        for source, part in {"local_compute": value - num_hits, "local_cache_hit": num_hits}.items():
            of_source = _renamed_labels(labels) | {"source": source}
            sources.add_sample("vllm:prompt_tokens_by_source_total", of_source, part)
    yield from (prompts, sources)
    cache = Metric("vllm:cache_config_info", "Size of the KV cache, in its labels.", "gauge")
    num_blocks = dict(_samples(families, "kv_cache_num_blocks"))
    for labels, value in _samples(families, "kv_cache_block_size"):
        size = {"block_size": f"{value:.0f}", "num_gpu_blocks": f"{num_blocks[labels]:.0f}"}
        cache.add_sample("vllm:cache_config_info", _renamed_labels(labels) | size, 1)
    yield cache
    yield _adapters_with_requests(families)


def _adapters_with_requests(families: Mapping[str, Metric]) -> Metric:
    """Return the family by which inference gateways know which adapters a server has in use."""
    info = Metric("vllm:lora_requests_info", "Adapters with requests, in its labels; the time.", "gauge")
    used: dict[str, defaultdict[_Labels, list[str]]] = {}
    for state in ("running", "waiting"):
        used[state] = defaultdict(list)
        for labels, count in _samples(families, f"num_adapter_requests_{state}"):
            if count:
                [adapter], model = _split(labels, "adapter")
                used[state][model].append(adapter)
    for labels, most in _samples(families, "max_loaded_adapters"):
        names = {f"{state}_lora_adapters": ",".join(found[labels]) for state, found in used.items()}
        of_server = _renamed_labels(labels) | names | {"max_lora": f"{most:.0f}"}
        info.add_sample("vllm:lora_requests_info", of_server, time.time())
    return info


def _split(labels: _Labels, name: str) -> tuple[list[str], _Labels]:
    """Return the value of a label, and the other labels."""
    others = tuple((key, value) for key, value in labels if key != name)
    return [value for key, value in labels if key == name], others


def _samples(families: Mapping[str, Metric], name: str) -> Iterator[tuple[_Labels, float]]:
    """Yield the labels and values of one of our gauges or counters, if it is there."""
    family = families.get(f"genserve_{name}")
    for sample in family.samples if family else ():
        if sample.name != f"genserve_{name}_created":
            yield tuple(sorted(sample.labels.items())), sample.value


def _renamed_labels(labels: _Labels) -> dict[str, str]:
    return {"engine": "0"} | {"model_name" if key == "model" else key: value for key, value in labels}


def _escaped(value: str) -> str:
    if _SPECIAL.search(value) is None:
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)
