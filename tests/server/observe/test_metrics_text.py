"""Prometheus' own parser reads /metrics, and vLLM's names for the metrics of a real server."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from genserve.generation_metrics import HistogramCollector, Metrics
from genserve.server.observe.metrics_text import VLLM_NAMES, metrics_text

MODELS = st.text(st.sampled_from("ab\\\n\"{},=é model"), min_size=1, max_size=8)
VALUES = st.floats(allow_nan=False)


def samples_of(text: str) -> dict[tuple[str, tuple], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.dictionaries(MODELS, VALUES, max_size=3), MODELS)
def test_the_text_means_what_that_of_prometheus_client_means(values, documentation):
    metrics = Metrics()
    gauge = Gauge("size", documentation, ("model", "of"), registry=metrics.registry)
    histogram = HistogramCollector("seconds", documentation, ("model",), (0.5, 1e9))
    metrics.registry.register(histogram)
    for model, value in values.items():
        gauge.labels(model, "a").set(value)
        metrics.cache_usage.labels(model).set(value)
        histogram.labels(model).observe(value, count=2)
    theirs = samples_of(generate_latest(metrics.registry).decode())
    text = metrics_text(metrics.registry).decode()
    ours = samples_of(text)
    assert {key: ours[key] for key in theirs} == theirs
    assert all(name.startswith("vllm:") for name, _ in ours.keys() - theirs.keys())
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(set(families)) == len(families)


@pytest.fixture(scope="module")
def scraped(tiny_server) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of a server that has answered, by name."""
    import httpx2

    with httpx2.Client(base_url=tiny_server.url, timeout=60) as http:
        for length in (3, 8):
            body = {"prompt": "a b c d e f g h " * 4, "max_tokens": length, "n": 2, "temperature": 1.0}
            assert http.post("/v1/completions", json=body).status_code == 200
        text = http.get("/metrics").text
    found = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


# What vLLM's dashboards examples/observability/prometheus_grafana/grafana.json and
# examples/observability/dashboards/grafana/query_statistics.json read, and the endpoint picker of the Gateway
# API inference extension.
READ_BY_DASHBOARDS = (
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:kv_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum",
    "vllm:cache_config_info",
)  # fmt: skip


@pytest.mark.parametrize("name", READ_BY_DASHBOARDS)
def test_dashboards_and_gateways_for_vllm_find_their_metrics(scraped, name):
    assert scraped[name]
    for labels, _ in scraped[name]:
        assert (labels["model_name"], labels["engine"]) == ("tiny", "0")


@pytest.mark.parametrize(("ours", "theirs"), VLLM_NAMES.items())
def test_a_number_has_both_names(scraped, ours, theirs):
    # The parser takes iteration_tokens_total for what it is, a histogram.
    suffix = next(suffix for suffix in ("_bucket", "_total", "") if scraped[ours + suffix])

    def values(name, of_model):
        found = scraped[name + suffix]
        return [(labels.get("le"), value) for labels, value in found if of_model(labels) == "tiny"]

    assert values(theirs, lambda labels: labels["model_name"]) == values(ours, lambda labels: labels["model"])


def test_finished_reasons_are_those_of_vllm(scraped):
    ours = {labels["finished_reason"]: value for labels, value in scraped["genserve_requests_total"]}
    theirs = {labels["finished_reason"]: value for labels, value in scraped["vllm:request_success_total"]}
    assert ours.keys() == {"stop", "length", "repetition", "abort", "error"}
    assert theirs == ours


def test_prompt_tokens_are_those_computed_and_those_cached(scraped):
    [(_, prompts)] = scraped["vllm:prompt_tokens_total"]
    by_source = {labels["source"]: value for labels, value in scraped["vllm:prompt_tokens_by_source_total"]}
    assert by_source["local_cache_hit"] == scraped["genserve_prefix_cache_hits_total"][0][1] > 0
    assert sum(by_source.values()) == prompts


def test_the_size_of_the_kv_cache_is_in_labels(scraped, tiny_server):
    [(labels, value)] = scraped["vllm:cache_config_info"]
    assert (value, int(labels["block_size"])) == (1, 16)
    assert int(labels["num_gpu_blocks"]) > 1


def test_the_adapters_with_requests_are_in_labels():
    metrics = Metrics()
    for model in ("tiny", "other"):
        metrics.for_model(model).adapters(known=3, max_loaded=2)
    tiny = metrics.for_model("tiny")
    for adapter in "abc":
        tiny.adapter_requests(adapter, waiting=1)
    tiny.adapter_requests("a", waiting=-1)
    tiny.adapter_requests("c", waiting=-1, running=1)
    text, name = metrics_text(metrics.registry).decode(), "vllm:lora_requests_info"
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {sample.labels.pop("model_name"): sample.labels for sample in families[name].samples}
    sizes = {"engine": "0", "max_lora": "2"}
    assert found["tiny"] == sizes | {"running_lora_adapters": "c", "waiting_lora_adapters": "b"}
    assert found["other"] == sizes | {"running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_a_latency_between_tokens_is_counted_for_each_step_of_each_answer(scraped):
    [(_, count)] = scraped["genserve_inter_token_latency_seconds_count"]
    [(_, first_tokens)] = scraped["genserve_time_to_first_token_seconds_count"]
    [(_, tokens)] = scraped["genserve_generation_tokens_total"]
    assert count <= tokens - first_tokens
    [(_, total)] = scraped["genserve_inter_token_latency_seconds_sum"]
    [(_, decode)] = scraped["genserve_request_decode_time_seconds_sum"]
    assert total == pytest.approx(decode, rel=1e-6)


def test_the_longest_choice_is_counted_once_for_a_request(scraped):
    [(_, requests)] = scraped["genserve_request_max_num_generation_tokens_count"]
    [(_, answers)] = scraped["genserve_request_generation_tokens_count"]
    assert 0 < requests <= answers - 2


# vllm/v1/metrics/loggers.py
VLLM_BOUNDS = {
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 "
    "10 20 40 80 160 640 2560",
    "vllm:inter_token_latency_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 "
    "20 40 80",
    "vllm:e2e_request_latency_seconds": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 "
    "7680",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


@pytest.mark.parametrize("name", VLLM_BOUNDS)
def test_every_bucket_of_vllm_exists(scraped, name):
    bounds = {float(labels["le"]) for labels, _ in scraped[f"{name}_bucket"]}
    assert bounds >= {float(bound) for bound in VLLM_BOUNDS[name].split()}


def test_a_metric_may_be_called_created():
    registry = Metrics().registry
    Gauge("objects_created", "text", registry=registry).set(3)
    assert "\nobjects_created 3.0\n" in metrics_text(registry).decode()
