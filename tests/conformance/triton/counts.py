"""Counts: what statistics and metrics count of a model; how often, never how long."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.conformance.triton.conversation import Conversation

__all__ = ["counts_of", "difference"]

_METRIC = re.compile(
    r"^(nv_inference_request_success|nv_inference_request_failure|nv_inference_count|nv_inference_exec_count"
    r"|nv_cache_num_hits_per_model|nv_cache_num_misses_per_model){(.*)} (\S+)$",
    flags=re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def counts_of(conversation: Conversation, models: tuple[str, ...]) -> dict[str, Counter[str]]:
    """Flat counts by model: `version 1: success`, `version 1: batches of 2`, `metric ...`."""
    counts = {model: Counter[str]() for model in models}
    for model in models:
        answer = conversation.ask({"protocol": "http", "verb": "GET", "path": f"/v2/models/{model}/stats"})
        for version in answer["json"].get("model_stats", ()):
            counts[model].update(_of_version(version))
    text = conversation.ask({"protocol": "metrics", "path": "/metrics"})["text"]
    for name, labels_text, value in _METRIC.findall(text):
        labels = dict(_LABEL.findall(labels_text))
        if (model := labels.pop("model")) in counts:
            words = " ".join(f"{key}={labels[key]}" for key in sorted(labels))
            counts[model][f"metric {name} {words}"] += int(float(value))
    return counts


def difference(before: dict[str, Counter[str]], after: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    """What was added, by model; only counts that changed."""
    return {
        model: {
            name: after[model][name] - before[model][name]
            for name in sorted(after[model].keys() | before[model].keys())
            if after[model][name] != before[model][name]
        }
        for model in after
    }


def _of_version(version: dict[str, Any]) -> dict[str, int]:
    prefix = f"version {version['version']}:"
    counts = {f"{prefix} {name}": version[name] for name in ("inference_count", "execution_count")}
    for name, duration in version["inference_stats"].items():
        counts[f"{prefix} {name}"] = duration["count"]
    for batch in version["batch_stats"]:
        counts[f"{prefix} batches of {batch['batch_size']}"] = batch["compute_infer"]["count"]
    return counts
