"""Health, metadata and configs of servers and models."""

from __future__ import annotations

from tests.conformance.triton.exchange import Topic
from tests.conformance.triton.scenarios.asking import get, grpc, talk

__all__ = ["TOPICS"]

_CONFIGS = (
    "add_sub",
    "auto_complete",
    "bare",
    "batcher",
    "batcher_preferred",
    "bls",
    "cached",
    "ensemble_decoupled",
    "ensemble_diamond",
    "fixed",
    "imports",
    "iterative",
    "labelled",
    "optional",
    "prioritized",
    "queue_timed",
    "repeat",
    "reshaped",
    "sequence_direct",
    "sequence_oldest",
    "told",
    "types",
    "versions_specific",
    "warm",
)

TOPICS = (
    Topic(
        name="health",
        run="all",
        exchanges=(
            talk("live", get("/v2/health/live")),
            talk("not_ready_while_a_model_failed", get("/v2/health/ready")),
            talk("grpc_live", grpc("ServerLive")),
            talk("grpc_not_ready_while_a_model_failed", grpc("ServerReady")),
            talk(
                "grpc_health_check",
                {"protocol": "grpc", "method": "/grpc.health.v1.Health/Check", "message": ""},
            ),
            talk("model_ready", get("/v2/models/pass/ready")),
            talk("model_version_ready", get("/v2/models/pass/versions/1/ready")),
            talk("failed_model_not_ready", get("/v2/models/broken_initialize/ready")),
            talk("unknown_model_not_ready", get("/v2/models/nowhere/ready")),
            talk("unknown_version_not_ready", get("/v2/models/pass/versions/9/ready")),
            talk("version_that_is_no_number", get("/v2/models/pass/versions/x/ready")),
            talk("ensemble_ready", get("/v2/models/ensemble_linear/ready")),
            talk("grpc_model_ready", grpc("ModelReady", name="pass")),
            talk("grpc_model_version_ready", grpc("ModelReady", name="pass", version="1")),
            talk("grpc_unknown_model_not_ready", grpc("ModelReady", name="nowhere")),
            talk("grpc_failed_model_not_ready", grpc("ModelReady", name="broken_initialize")),
            talk("grpc_version_that_is_no_number", grpc("ModelReady", name="pass", version="x")),
        ),
    ),
    Topic(
        name="metadata",
        run="all",
        exchanges=(
            talk("server_metadata", get("/v2")),
            talk("grpc_server_metadata", grpc("ServerMetadata")),
            *(
                talk(f"model_{name}", get(f"/v2/models/{name}"))
                for name in (
                    "add_sub",
                    "auto_complete",
                    "bare",
                    "ensemble_decoupled",
                    "fixed",
                    "identity_bf16",
                    "optional",
                    "reshaped",
                    "sequence_direct",
                    "types",
                    "versions_latest",
                )
            ),
            talk("model_version", get("/v2/models/versions_specific/versions/3")),
            talk("unknown_model", get("/v2/models/nowhere")),
            talk("unknown_version", get("/v2/models/pass/versions/9")),
            talk("failed_model", get("/v2/models/broken_initialize")),
            talk("model_whose_config_is_broken", get("/v2/models/broken_config")),
            talk("grpc_model", grpc("ModelMetadata", name="add_sub")),
            talk("grpc_unknown_model", grpc("ModelMetadata", name="nowhere")),
            talk("grpc_unknown_version", grpc("ModelMetadata", name="pass", version="9")),
            talk("grpc_version_that_is_no_number", grpc("ModelMetadata", name="pass", version="x")),
            talk("version_that_is_no_number", get("/v2/models/pass/versions/x")),
        ),
    ),
    Topic(
        name="config",
        run="all",
        exchanges=(
            *(talk(f"of_{name}", get(f"/v2/models/{name}/config")) for name in _CONFIGS),
            talk("of_a_version", get("/v2/models/versions_specific/versions/1/config")),
            talk("of_an_unknown_model", get("/v2/models/nowhere/config")),
            talk("of_an_unknown_version", get("/v2/models/pass/versions/9/config")),
            talk("of_a_failed_model", get("/v2/models/broken_initialize/config")),
            *(
                talk(f"grpc_of_{name}", grpc("ModelConfig", name=name))
                for name in ("add_sub", "auto_complete", "ensemble_linear", "sequence_direct", "told", "warm")
            ),
            talk("grpc_of_an_unknown_model", grpc("ModelConfig", name="nowhere")),
        ),
    ),
)
