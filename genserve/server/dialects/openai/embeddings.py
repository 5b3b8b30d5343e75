"""OpenAI embeddings: `/v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from typing import Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from genserve.errors import InvalidRequest
from genserve.repository.encoder_model import EncoderModel
from genserve.sampling.logits_array import FloatArray
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.openai.completions import Texts
from genserve.server.dialects.vectors import Text, encode, prompt_of, require_vectors, written
from genserve.server.error_formats import OPENAI_ERRORS
from genserve.server.http.request_body import TolerantBody
from genserve.server.route import Router, rules
from genserve.server.services import SharedServices

router = Router(prefix="/v1", tag="OpenAI", errors=OPENAI_ERRORS)


class EmbeddingsBody(TolerantBody):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["The sea is calm."]}]})

    model: str | None = Field(
        default=None, description="The name of a model; not needed if there is only one of vectors."
    )
    input: Texts = Field(description="A text, its token ids, or a list of such; each gets a vector.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None,
        description="How vectors are written: as numbers, or as little-endian float32 in base64.",
        json_schema_extra={"default": "float"},
    )
    dimensions: int | None = Field(
        default=None, description="Only the first numbers of each vector, scaled to the length 1."
    )
    prompt_name: str | None = Field(
        default=None, description="TEI's: the prompt of the model that is written before texts."
    )
    input_type: Literal["query", "document", "passage"] | None = Field(
        default=None,
        description="The use of the texts, for which the model may have a prompt; passage is document.",
    )
    truncate_prompt_tokens: Literal[-1] | None = Field(
        default=None, description="vLLM's: -1 truncates texts that are too long."
    )

    def texts(self, model: EncoderModel) -> list[Text]:
        """Return the texts with the prompt, or the lists of token ids; raises InvalidRequest."""
        kind = "document" if self.input_type == "passage" else self.input_type
        prompt = prompt_of(model, prompt_name=self.prompt_name, input_type=kind)
        match self.input:
            case str():
                return [prompt + self.input]
            case [int(), *_]:
                return [self.input]  # type: ignore[list-item]
            case _:
                return [prompt + one if isinstance(one, str) else one for one in self.input]  # type: ignore[misc]


@router.post("/embeddings")
@rules(INFERENCE)
async def embeddings(body: EmbeddingsBody, services: SharedServices, request: Request) -> Response:
    """Return a vector for each text."""
    model = require_vectors(await services.encoder_model(body.model))
    texts = body.texts(model)
    if not texts:
        raise InvalidRequest("input is empty", field="input", remedy="give at least one text")
    encoded = await encode(
        model,
        texts,
        services,
        request,
        truncate=body.truncate_prompt_tokens is not None,
        dimensions=body.dimensions,
    )
    num_tokens = sum(encoded.num_tokens)
    document = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _in_format(vector, body.encoding_format)}
            for index, vector in enumerate(encoded.rows)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return await written(document, encoded.rows)


def _in_format(vector: FloatArray, encoding_format: str | None) -> FloatArray | str:
    return b64encode(vector.astype("<f4").tobytes()).decode() if encoding_format == "base64" else vector
