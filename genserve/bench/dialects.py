"""Dialects: how each HTTP interface writes a request and the events of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from genserve.bench.datasets import BenchPrompt
from genserve.errors import InvalidRequest

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The parameters that all requests of a load share."""

    model: str
    temperature: float
    ignore_eos: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The content of one event of an answer."""

    has_text: bool
    prompt_tokens: int | None = None    # counts of the whole answer so far; None: the event has none
    output_tokens: int | None = None
    is_last: bool = False               # the answer is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One HTTP interface for text generation.

    Attributes:
        path: the path of the endpoint; `{model}` is the name of the model.
        body: writes the body of a request.
        read: reads an event, or a whole answer if it is not streamed; raises KeyError, TypeError,
            AttributeError or IndexError for any other shape.
        is_streamed: whether the answer is a stream of events.
        marks_end: whether an event of a complete answer says that it is the last one.
    """

    path: str
    body: Callable[[BenchPrompt, Requested], dict[str, Any]]
    read: Callable[[Event], Chunk]
    is_streamed: bool = True
    marks_end: bool = True

    def url(self, base_url: str, *, model: str) -> str:
        """Return the URL of the endpoint."""
        return base_url + self.path.format(model=quote(model, safe=""))


def check_prompts(prompts: Iterable[BenchPrompt], *, backend: str) -> None:
    """Check that a dialect can write the prompts of a file.

    Raises:
        InvalidRequest: the prompts are chats or tensors, and the dialect accepts texts only.
    """
    for prompt in prompts:
        if prompt.messages and backend != "openai-chat":
            kind, only = "messages", "openai-chat"
        elif "inputs" in prompt.fields and backend != "kserve-infer":
            kind, only = "inputs", "kserve-infer"
        else:
            continue
        raise InvalidRequest(
            f"the dataset has {kind}, which {backend} does not take", remedy=f"--backend {only}"
        )


def _openai_body(requested: Requested) -> dict[str, Any]:
    body = {
        "model": requested.model,
        "temperature": requested.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | ({"ignore_eos": True} if requested.ignore_eos else {})


def _chat_body(prompt: BenchPrompt, requested: Requested) -> dict[str, Any]:
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    return _openai_body(requested) | {"messages": messages, "max_tokens": prompt.max_tokens}


def _completions_body(prompt: BenchPrompt, requested: Requested) -> dict[str, Any]:
    return _openai_body(requested) | {"prompt": prompt.text, "max_tokens": prompt.max_tokens}


def _read_openai(event: Event) -> Chunk:
    """Read a chunk; reasoning and parts of tool calls count as text."""
    usage = event.get("usage") or {}
    has_text = is_last = False
    for choice in event["choices"]:
        said = choice.get("delta") or choice
        has_text = has_text or any(said.get(name) for name in _TEXT_FIELDS)
        is_last = is_last or choice.get("finish_reason") is not None
    return Chunk(
        has_text=has_text,
        prompt_tokens=usage.get("prompt_tokens"),
        output_tokens=usage.get("completion_tokens"),
        is_last=is_last,
    )


_TEXT_FIELDS = ("content", "text", "reasoning_content", "reasoning", "tool_calls")


def _tgi_body(prompt: BenchPrompt, requested: Requested) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": prompt.max_tokens}
    if requested.temperature > 0:       # TGI rejects 0, and is greedy unless it is asked to sample
        parameters |= {"do_sample": True, "temperature": requested.temperature}
    if requested.ignore_eos:
        parameters["ignore_eos"] = True
    # TGI itself has one model, and ignores the name.
    named = {"model": requested.model} if requested.model else {}
    return named | {"inputs": prompt.text, "parameters": parameters}


def _read_tgi(event: Event) -> Chunk:
    details = event.get("details") or {}
    return Chunk(
        has_text=bool(event["token"]["text"]),
        prompt_tokens=details.get("input_length"),
        output_tokens=details.get("generated_tokens"),
        is_last=event.get("generated_text") is not None,
    )


def _generate_body(prompt: BenchPrompt, requested: Requested) -> dict[str, Any]:
    parameters = {"stream": True, "max_tokens": prompt.max_tokens, "temperature": requested.temperature}
    if requested.ignore_eos:    # only some backends know `ignore_eos`; all know `min_tokens`
        parameters["min_tokens"] = prompt.max_tokens
    return {"text_input": prompt.text, "parameters": parameters}


def _infer_body(prompt: BenchPrompt, _requested: Requested) -> dict[str, Any]:
    if "inputs" in prompt.fields:       # the tensors of any model, not only a text model
        return {}
    text = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [prompt.text]}
    length = {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [prompt.max_tokens]}
    return {"inputs": [text, length]}


# The names are the backends of `vllm bench serve`, where it has one.
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "openai-chat": Dialect(path="/v1/chat/completions", body=_chat_body, read=_read_openai),
        "openai": Dialect(path="/v1/completions", body=_completions_body, read=_read_openai),
        "tgi": Dialect(path="/generate_stream", body=_tgi_body, read=_read_tgi),
        "kserve-generate": Dialect(
            path="/v2/models/{model}/generate_stream",
            body=_generate_body,
            read=lambda event: Chunk(has_text=bool(event["text_output"])),
            marks_end=False,
        ),
        "kserve-infer": Dialect(
            path="/v2/models/{model}/infer",
            body=_infer_body,
            read=lambda answer: Chunk(has_text=bool(answer["outputs"]), is_last=True),
            is_streamed=False,
        ),
    }
)
