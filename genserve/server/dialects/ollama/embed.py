"""Ollama's embeddings: `/api/embed`, and the older `/api/embeddings` for one text."""

from __future__ import annotations

import time

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from genserve.repository.encoder_model import EncoderModel
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.ollama.body import KeepAlive, keep_alive_seconds
from genserve.server.dialects.ollama.routes import OLLAMA_ERRORS, local_name
from genserve.server.dialects.vectors import (
    VectorsResponse,
    encode,
    prompt_of,
    require_vectors,
    written,
)
from genserve.server.http.request_body import Items, TolerantBody
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices

router = Router(prefix="/api", tag="Ollama", errors=OLLAMA_ERRORS)


class EmbedBody(TolerantBody):
    """Body of `POST /api/embed`; `options` have no effect."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "minilm", "input": ["The sea is calm."]}]}
    )

    model: str = Field(description="The name of the model.")
    input: str | Items[str] = Field(description="A text or a list of texts; each gets a vector.")
    truncate: bool | None = Field(
        default=None,
        description="Truncate texts that are too long, instead of rejecting them.",
        json_schema_extra={"default": True},
    )
    dimensions: int | None = Field(
        default=None, description="Only the first numbers of each vector, scaled to the length 1."
    )
    keep_alive: KeepAlive = None


class EmbeddingsBody(TolerantBody):
    """Body of `POST /api/embeddings`; `options` have no effect."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "minilm", "prompt": "The sea."}]})

    model: str = Field(description="The name of the model.")
    prompt: str = Field(description="The text.")
    keep_alive: KeepAlive = None


@router.post("/embed")
@rules(INFERENCE)
async def embed(body: EmbedBody, services: SharedServices, request: Request) -> Response:
    """Return a vector for each text."""
    started_ns = time.monotonic_ns()
    model = await _model(services, body)
    texts = ([body.input] if body.input else []) if isinstance(body.input, str) else [*body.input]
    if not texts:  # with which Ollama's clients load a model
        return VectorsResponse({"model": body.model, "embeddings": []})
    prompt = prompt_of(model)
    texts = [prompt + text for text in texts]
    encoded = await encode(
        model,
        texts,
        services,
        request,
        truncate=body.truncate is not False,
        dimensions=body.dimensions,
    )
    document = {
        "model": body.model,
        "embeddings": list(encoded.rows),
        "total_duration": time.monotonic_ns() - started_ns,
        "load_duration": 0,
        "prompt_eval_count": sum(encoded.num_tokens),
    }
    return await written(document, encoded.rows)


@router.post("/embeddings")
@rules(INFERENCE)
async def embeddings(body: EmbeddingsBody, services: SharedServices, request: Request) -> Response:
    """Return the vector of one text."""
    model = await _model(services, body)
    if not body.prompt:
        return VectorsResponse({"embedding": []})
    text = prompt_of(model) + body.prompt
    encoded = await encode(model, [text], services, request, truncate=True, field="prompt")
    return VectorsResponse({"embedding": encoded.rows[0]})


async def _model(services: Services, body: EmbedBody | EmbeddingsBody) -> EncoderModel:
    """Return a model by any of its names."""
    name, keep_alive_s = local_name(services, body.model), keep_alive_seconds(body.keep_alive)
    return require_vectors(await services.encoder_model(name, keep_alive_s=keep_alive_s))
