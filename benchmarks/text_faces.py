"""Text faces: the HTTP interfaces of a text model, as `faults.py` calls them and judges how answers end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """One HTTP interface.

    Attributes:
        whole: the path of answers that are not streamed.
        stream: the path of streams.
        body: the body of a request, by model, prompt and number of new tokens.
        end: a pattern that matches once in a stream, at its end; None: only the last chunk marks the end.
        failure: a pattern that matches the error of a stream, which then has no other end.
        names_stream: whether the body says that the answer is streamed.
    """

    whole: str
    stream: str
    body: Callable[[str, str, int], Body]
    end: re.Pattern[bytes] | None
    failure: re.Pattern[bytes]
    names_stream: bool = True

    def num_ends(self, body: bytes) -> int:
        """Return how often a complete stream says that it has ended, which should be once."""
        failures = len(self.failure.findall(body))
        if self.end is None:
            return max(1, failures)
        return len(self.end.findall(body)) + failures


def _message(prompt: str) -> list[Body]:
    return [{"role": "user", "content": prompt}]


def _chat(model: str, prompt: str, tokens: int) -> Body:
    return {
        "model": model, "messages": _message(prompt), "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def _completions(model: str, prompt: str, tokens: int) -> Body:
    return {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


def _responses(model: str, prompt: str, tokens: int) -> Body:
    return {
        "model": model, "input": prompt, "max_output_tokens": max(16, tokens), "temperature": 0,
        "store": False,
    }  # fmt: skip


def _messages(model: str, prompt: str, tokens: int) -> Body:
    return {"model": model, "messages": _message(prompt), "max_tokens": tokens, "temperature": 0}


def _ollama(model: str, prompt: str, tokens: int) -> Body:
    options = {"num_predict": tokens, "temperature": 0}
    return {"model": model, "messages": _message(prompt), "options": options}


def _gemini(_model: str, prompt: str, tokens: int) -> Body:
    config = {"maxOutputTokens": tokens, "temperature": 0, "ignoreEos": True}
    return {"contents": [{"role": "user", "parts": [{"text": prompt}]}], "generationConfig": config}


def _tgi(model: str, prompt: str, tokens: int) -> Body:
    return {"model": model, "inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}


def _kserve(_model: str, prompt: str, tokens: int) -> Body:
    return {"text_input": prompt, "max_tokens": tokens}


_OPENAI_FAILURE = re.compile(rb'^data: \{"error"', re.MULTILINE)
_OPENAI_END = re.compile(rb'"finish_reason": "')

# `{model}` in a path is the model's name.
FACES: Mapping[str, Face] = MappingProxyType(
    {
        "chat": Face(
            whole="/v1/chat/completions", stream="/v1/chat/completions", body=_chat,
            end=_OPENAI_END, failure=_OPENAI_FAILURE,
        ),
        "completions": Face(
            whole="/v1/completions", stream="/v1/completions", body=_completions,
            end=_OPENAI_END, failure=_OPENAI_FAILURE,
        ),
        "responses": Face(
            whole="/v1/responses", stream="/v1/responses", body=_responses,
            end=re.compile(rb"^event: response\.(?:completed|incomplete)$", re.MULTILINE),
            failure=re.compile(rb"^event: response\.failed$", re.MULTILINE),
        ),
        "messages": Face(
            whole="/v1/messages", stream="/v1/messages", body=_messages,
            end=re.compile(rb"^event: message_stop$", re.MULTILINE),
            failure=re.compile(rb"^event: error$", re.MULTILINE),
        ),
        "ollama": Face(
            whole="/api/chat", stream="/api/chat", body=_ollama,
            end=re.compile(rb'"done":true'), failure=re.compile(rb'^\{"error"', re.MULTILINE),
        ),
        "gemini": Face(
            whole="/v1beta/models/{model}:generateContent",
            stream="/v1beta/models/{model}:streamGenerateContent?alt=sse",
            body=_gemini, end=re.compile(rb'"finishReason":'),
            failure=re.compile(rb'^data: \{"error"', re.MULTILINE), names_stream=False,
        ),
        "tgi": Face(
            whole="/generate", stream="/generate_stream", body=_tgi,
            end=re.compile(rb'"generated_text": "'), failure=re.compile(rb'^data: ?\{"error"', re.MULTILINE),
            names_stream=False,
        ),
        "kserve": Face(
            whole="/v2/models/{model}/generate", stream="/v2/models/{model}/generate_stream", body=_kserve,
            end=None, failure=re.compile(rb'^data: ?\{"error"', re.MULTILINE),
        ),
    }
)  # fmt: skip


def request_of(face: Face, model: str, prompt: str, *, tokens: int, stream: bool) -> tuple[str, bytes]:
    """Return the path and the body of a request."""
    body = face.body(model, prompt, tokens) | ({"stream": stream} if face.names_stream else {})
    return (face.stream if stream else face.whole).format(model=model), json.dumps(body).encode()
