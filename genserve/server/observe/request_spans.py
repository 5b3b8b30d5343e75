"""Request spans: one OpenTelemetry span for each request that generates text, sent to a collector by OTLP.

The attributes are those of OpenTelemetry's conventions for generative AI, and vLLM's `gen_ai.latency.*`. No
span contains a prompt or an answer. Triton's traces, the timestamps of KServe requests in a file, are
`tracing.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from genserve.engine.generation_request import AnswerRecord
from genserve.errors import GenserveError, MissingDependency
from genserve.request_context import RequestContext
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.error_statuses import error_code
from genserve.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# OpenTelemetry's own variables, the more specific first.
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NAME_VARIABLES = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
_SCHEMES = {"http": True, "grpc": True, "https": False, "grpcs": False}     # whether without TLS
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
_MAX_INT = 2**63 - 1        # OTLP's largest integer
_MAX_CHARS = 256


class RequestSpans:
    """The spans of one server; a thread sends them in batches, or drops them if the collector is silent.

    A span ends at the time of the host's clock; the monotonic clock measures its duration.
    """

    def __init__(self, endpoint: str) -> None:
        """Send to an OTLP collector: http://HOST:4317 for gRPC, http://HOST:4318/v1/traces for HTTP.

        Raises:
            GenserveError: it is no such address.
            MissingDependency: the packages of the extra `otel` are not installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise MissingDependency(
                "--otlp-traces-endpoint needs OpenTelemetry", remedy="pip install 'genserve[otel]'"
            ) from error
        resource = {"service.version": __version__}
        if not any(name in os.environ for name in _NAME_VARIABLES):
            resource["service.name"] = "genserve"
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("genserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def send(
        self, request: RequestContext, *, attributes: Mapping[str, Any], carrier: Mapping[str, str]
    ) -> None:
        """Queue the span of a request that has ended now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{request.operation} {_plain(request.model)}".rstrip(),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end_ns - round((time.monotonic() - request.started_s) * 1e9),
        )
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is queued; blocks while the collector does not answer."""
        self._provider.shutdown()


class RequestSpan:
    """The span of a request that runs."""

    __slots__ = ("_headers", "_spans")

    def __init__(self, spans: RequestSpans, headers: Iterable[tuple[bytes | str, bytes | str]]) -> None:
        """Begin the span of a request, whose headers `traceparent` and `tracestate` name the parent."""
        self._spans = spans
        self._headers = headers

    def end(self, request: RequestContext) -> None:
        """Send it, if the request was one for text."""
        if not request.operation:
            return
        pairs = ((_text(name), _text(value)) for name, value in self._headers)
        carrier = {name: value for name, value in pairs if name in ("traceparent", "tracestate")}
        self._spans.send(request, attributes=_attributes(request), carrier=carrier)


def _text(value: bytes | str) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _exporter(endpoint: str) -> SpanExporter:
    """Return the exporter of the address's protocol, unless OpenTelemetry's variables name another one."""
    address = urlsplit(endpoint)
    if address.scheme not in _SCHEMES or not address.hostname:
        raise GenserveError(
            f"--otlp-traces-endpoint {endpoint!r} is not an address of a collector",
            remedy="write http://HOST:4317 for OTLP over gRPC, or http://HOST:4318/v1/traces for HTTP",
        )
    default = "http/protobuf" if address.path.strip("/") else "grpc"
    protocol = next((os.environ[name] for name in _PROTOCOL_VARIABLES if name in os.environ), default)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=address.netloc, insecure=_SCHEMES[address.scheme])
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        path = "" if address.path.strip("/") else "/v1/traces"
        return trace_exporter.OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)
    raise GenserveError(
        f"the OTLP protocol {protocol!r} is not supported",
        remedy=f"set {_PROTOCOL_VARIABLES[0]} to grpc or http/protobuf, or unset it",
    )


def _attributes(request: RequestContext) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "genserve",
        "gen_ai.request.model": _plain(request.model),
        "gen_ai.request.id": request.id,
        "gen_ai.latency.e2e": time.monotonic() - request.started_s,
    }
    if request.streams:
        attributes["gen_ai.request.stream"] = True
    if request.error is not None:
        attributes["error.type"] = error_code(request.error)
    if request.operation == "embeddings":
        attributes |= {
            "gen_ai.response.model": request.model, "gen_ai.usage.input_tokens": request.prompt_tokens
        }
    elif request.answers:
        answers = cast("Sequence[AnswerRecord]", request.answers)
        attributes |= _parameters(request, answers[0].request.params)
        attributes |= _usage(request)
        attributes |= _latencies(request, answers)
    return attributes


def _parameters(request: RequestContext, params: SamplingParams) -> dict[str, Any]:
    values = ((name, getattr(params, name)) for name in _PARAMETERS)
    attributes: dict[str, Any] = {
        f"gen_ai.request.{name}": value for name, value in values if value is not None and value <= _MAX_INT
    }
    if params.stop:
        attributes["gen_ai.request.stop_sequences"] = [*map(_plain, params.stop)]
    if request.num_choices > 1:
        attributes["gen_ai.request.choice.count"] = request.num_choices
    return attributes


def _plain(text: str) -> str:
    """Return a text of a client as OTLP can hold it: in UTF-8, and not too long."""
    return text[:_MAX_CHARS].encode(errors="replace").decode()


def _usage(request: RequestContext) -> dict[str, Any]:
    return {
        "gen_ai.response.model": request.model,
        "gen_ai.response.finish_reasons": request.finish_reasons(),
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "gen_ai.usage.output_tokens": request.completion_tokens,
    }


def _latencies(request: RequestContext, answers: Sequence[AnswerRecord]) -> dict[str, float]:
    """Return the times from arrival to the first step, to the first token, and to the last, in seconds."""
    started_s = min((a.started_s for a in answers if a.started_s is not None), default=None)
    first_s = min((a.first_token_s for a in answers if a.first_token_s is not None), default=None)
    last_s = max((a.last_token_s for a in answers if a.last_token_s is not None), default=None)
    if started_s is None:
        return {}
    times = {"gen_ai.latency.time_in_queue": started_s - request.started_s}
    if first_s is not None and last_s is not None:
        times["gen_ai.latency.time_to_first_token"] = first_s - request.started_s
        times["gen_ai.latency.time_in_model_prefill"] = first_s - started_s
        times["gen_ai.latency.time_in_model_decode"] = last_s - first_s
        times["gen_ai.latency.time_in_model_inference"] = last_s - started_s
        if request.streams:
            times["gen_ai.response.time_to_first_chunk"] = first_s - request.started_s
    return times
