"""Tritonserver flags: those that genserve does not have, and what to do in place of each.

The names are those of Triton's command_line_parser.cc. A flag that `genserve serve` takes is not among them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REFUSED", "RefusedFlag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFlag:
    """A flag of tritonserver that has no meaning here."""

    instead: str            # why, and what to do
    idle: str = ""          # the value that asks for nothing: with it, the flag is passed over


_THREADS = "requests are answered on one event loop, and models run on threads of their own; drop the flag"
_POOLS = "gRPC allocates each message when it comes and frees it after the answer; drop the flag"
_CUDA_POOL = "tensors are copied to a GPU by the backend that runs there, from no pool; drop the flag"
_FACADE = "that protocol is not served: send KServe requests to /v2/models/NAME/infer on the HTTP port"
_TLS = "all ports speak TLS together: --ssl-certfile, --ssl-keyfile; --ssl-ca-certs for clients' certificates"
_TRACE = "an older spelling of --trace-config: write that"

REFUSED: dict[str, RefusedFlag] = {
    "--allow-http": RefusedFlag(
        instead="health checks need the HTTP port; keep others away from it with --http-address=127.0.0.1",
        idle="true",
    ),
    "--http-thread-count": RefusedFlag(instead=_THREADS),
    "--grpc-infer-thread-count": RefusedFlag(instead=_THREADS),
    "--grpc-infer-allocation-pool-size": RefusedFlag(instead=_POOLS),
    "--grpc-max-response-pool-size": RefusedFlag(instead=_POOLS),
    "--grpc-use-ssl": RefusedFlag(instead=_TLS, idle="false"),
    "--grpc-use-ssl-mutual": RefusedFlag(instead=_TLS, idle="false"),
    "--grpc-server-cert": RefusedFlag(instead=_TLS),
    "--grpc-server-key": RefusedFlag(instead=_TLS),
    "--grpc-root-cert": RefusedFlag(instead=_TLS),
    "--model-namespacing": RefusedFlag(
        instead="a model is found by its name alone, in requests, in the index and by BLS; rename one of two "
        "models of the same name, or run one server for each repository",
        idle="false",
    ),
    "--model-load-retry-count": RefusedFlag(
        instead="a load that fails is tried again with the next load call, or once its files change with "
        "--model-control-mode=poll",
        idle="0",
    ),
    "--enable-peer-access": RefusedFlag(
        instead="no tensor goes from one GPU to another; drop the flag", idle="false"
    ),
    "--host-policy": RefusedFlag(
        instead="the operating system places threads and memory; start the server under numactl or taskset"
    ),
    "--model-load-gpu-limit": RefusedFlag(
        instead="set `kv_cache_bytes` in the parameters of a logits model, which is what grows"
    ),
    "--min-supported-compute-capability": RefusedFlag(
        instead="every GPU that CUDA shows may be used; hide one with CUDA_VISIBLE_DEVICES"
    ),
    "--pinned-memory-pool-byte-size": RefusedFlag(instead=_CUDA_POOL),
    "--cuda-memory-pool-byte-size": RefusedFlag(instead=_CUDA_POOL),
    "--cuda-virtual-address-size": RefusedFlag(
        instead="states do not grow in place; drop the flag, and `use_growable_memory` in the configs"
    ),
    "--buffer-manager-thread-count": RefusedFlag(
        instead="an instance gathers its inputs on its own thread; drop the flag"
    ),
    "--cache-directory": RefusedFlag(
        instead="no libraries of caches are loaded: --cache-config=local,size=BYTES is the one there is"
    ),
    "--repoagent-directory": RefusedFlag(
        instead="repository agents are not run: change the files of a model before they are served"
    ),
    "--allow-gpu-metrics": RefusedFlag(
        instead="there are no nv_gpu_* metrics: run NVIDIA's dcgm-exporter beside the server", idle="false"
    ),
    "--allow-sagemaker": RefusedFlag(instead=_FACADE, idle="false"),
    "--sagemaker-port": RefusedFlag(instead=_FACADE),
    "--sagemaker-safe-port-range": RefusedFlag(instead=_FACADE),
    "--sagemaker-thread-count": RefusedFlag(instead=_FACADE),
    "--allow-vertex-ai": RefusedFlag(instead=_FACADE, idle="false"),
    "--vertex-ai-port": RefusedFlag(instead=_FACADE),
    "--vertex-ai-thread-count": RefusedFlag(instead=_FACADE),
    "--vertex-ai-default-model": RefusedFlag(instead=_FACADE),
    "--trace-file": RefusedFlag(instead=_TRACE),
    "--trace-level": RefusedFlag(instead=_TRACE),
    "--trace-rate": RefusedFlag(instead=_TRACE),
    "--trace-count": RefusedFlag(instead=_TRACE),
    "--trace-log-frequency": RefusedFlag(instead=_TRACE),
}
