"""Tritonserver flags: reads tritonserver's spelling of switches, and rejects flags with a remedy.

The names are those of Triton's command_line_parser.cc.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from genserve.cli.parser import FALSE, TRUE, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedFlag:
    """A flag of tritonserver that genserve does not support."""

    remedy: str             # the reason, and what to do instead
    ignored_value: str      # a value that has no effect, and so is accepted and ignored; empty: none


# The flags, as FLAG or FLAG=IGNORED_VALUE, and their remedies.
_FLAGS = (
    (
        "--allow-http=true",
        "health checks need the HTTP port; hide it from other machines with --http-address=127.0.0.1",
    ),
    (
        "--http-thread-count --grpc-infer-thread-count",
        "one event loop answers requests, and models run on their own threads; drop the flag",
    ),
    (
        "--grpc-infer-allocation-pool-size --grpc-max-response-pool-size",
        "gRPC allocates each message as it arrives and frees it after the response; drop the flag",
    ),
    (
        "--grpc-use-ssl=false --grpc-use-ssl-mutual=false --grpc-server-cert --grpc-server-key "
        "--grpc-root-cert",
        "TLS is set for all ports together: --ssl-certfile, --ssl-keyfile; --ssl-ca-certs verifies clients",
    ),
    (
        "--model-namespacing=false",
        "requests, the index and BLS find a model by its name alone; rename one of two models of the same "
        "name, or run one server per repository",
    ),
    (
        "--model-load-retry-count=0",
        "a failed load is retried by the next load call, or with --model-control-mode=poll once the model's "
        "files change",
    ),
    ("--enable-peer-access=false", "tensors are never copied from one GPU to another; drop the flag"),
    (
        "--host-policy",
        "the operating system places threads and memory; start the server under numactl or taskset",
    ),
    (
        "--model-load-gpu-limit",
        "set `kv_cache_bytes` in the parameters of a logits model to bound the memory that grows",
    ),
    (
        "--min-supported-compute-capability",
        "every GPU that CUDA shows may be used; hide one with CUDA_VISIBLE_DEVICES",
    ),
    (
        "--pinned-memory-pool-byte-size --cuda-memory-pool-byte-size",
        "each backend copies its tensors to the GPU itself, without a pool; drop the flag",
    ),
    (
        "--cuda-virtual-address-size",
        "states do not grow in place; drop the flag, and `use_growable_memory` in the configs",
    ),
    ("--buffer-manager-thread-count", "each instance gathers its inputs on its own thread; drop the flag"),
    (
        "--cache-directory",
        "cache libraries are not loaded; the only cache is --cache-config=local,size=BYTES",
    ),
    ("--repoagent-directory", "repository agents are not run; change a model's files before they are served"),
    (
        "--allow-gpu-metrics=false",
        "there are no nv_gpu_* metrics; run NVIDIA's dcgm-exporter alongside the server",
    ),
    (
        "--allow-sagemaker=false --sagemaker-port --sagemaker-safe-port-range --sagemaker-thread-count "
        "--allow-vertex-ai=false --vertex-ai-port --vertex-ai-thread-count --vertex-ai-default-model",
        "that protocol is not served; send KServe requests to /v2/models/NAME/infer on the HTTP port",
    ),
    (
        "--trace-file --trace-level --trace-rate --trace-count --trace-log-frequency",
        "this is an older spelling of --trace-config; use that",
    ),
)

REJECTED_FLAGS = {
    name: RejectedFlag(remedy=remedy, ignored_value=value)
    for flags, remedy in _FLAGS
    for name, _, value in (flag.partition("=") for flag in flags.split())
}


def tritonserver_words(words: Sequence[str], *, switches: Mapping[str, str]) -> list[str]:
    """Turn the words of a tritonserver command line into words of `genserve serve`.

    A switch may be written `--switch`, `--no-switch`, `--switch=true`, `--switch=false` and `--switch false`.
    One of the `REJECTED_FLAGS` whose value has no effect is left out.

    Args:
        words: the command line.
        switches: the names of switches, and the names that switch them off.

    Raises:
        UsageError: one of the `REJECTED_FLAGS` has another value.
    """
    read = []
    for word in _joined(words, {*switches, *REJECTED_FLAGS}):
        name, _, value = word.partition("=")
        flag = REJECTED_FLAGS.get(name)
        if flag is None:
            read.append(_rewritten(word, switches))
        elif not value or _switch_value(value) != _switch_value(flag.ignored_value):
            raise UsageError(
                f"{name} is a flag of tritonserver that genserve does not have: {flag.remedy}"
            )
    return read


def _joined(words: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """Yield `--switch=false` for the words `--switch` and `false`, as tritonserver reads them."""
    rest = iter([*words, ""])
    word = next(rest)
    for following in rest:
        if word in flags and following.lower() in TRUE | FALSE:
            yield f"{word}={following}"
            word = next(rest)
        else:
            yield word
            word = following


def _switch_value(value: str) -> str:
    """Return "true" or "false" for their spellings, and any other value unchanged."""
    lower = value.lower()
    return "true" if lower in TRUE else "false" if lower in FALSE else value


def _rewritten(word: str, switches: Mapping[str, str]) -> str:
    name, _, value = word.partition("=")
    if name in switches:
        match _switch_value(value):
            case "true":
                return name
            case "false":
                return switches[name]
    return word
