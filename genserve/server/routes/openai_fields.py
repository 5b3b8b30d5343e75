"""OpenAI fields: what the bodies of its dialect have in common.

A field that OpenAI knows and we do not honour is refused by name, unless its value asks for nothing;
a field that nobody knows is passed over, and named in the header `x-genserve-ignored`, as one is that means
nothing beside the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from genserve.errors import InvalidRequest
from genserve.request import Prompt
from genserve.sampling.checks import MAX_BEST_OF, MAX_TOP_LOGPROBS
from genserve.sampling.params import SamplingParams, sampling_params
from genserve.server.body import Body
from genserve.server.decoding_fields import DecodingFields, Texts
from genserve.text.detokenizer import Detokenizer
from genserve.text.tokenizer import Tokenizer

__all__ = ["OpenAIBody", "StreamOptions"]

# What huggingface_hub's InferenceClient writes for "the model at this URL".
_ANY_MODEL = frozenset({"dummy", "tgi"})
# Labels for OpenAI's own bookkeeping; they change nothing in an answer.
_INERT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_REMEDIES = {
    "chat_template": "a template is a program, and none comes over the wire: "
    "put chat_template.jinja into the model's tokenizer stage",
}
MAX_CHOICES = 128


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool | None = None     # padding against traffic analysis: never added


class OpenAIBody(DecodingFields):
    """Base of the bodies of `/v1`; extras beyond OpenAI's have vLLM's names.

    Attributes:
        neutral: known and not honoured: the values with which a client asks for nothing.
    """

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_BEST_OF)
    stop: Texts = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """The prompts in their order; raises InvalidRequest."""

    @abstractmethod
    def params(self) -> SamplingParams:
        """The sampling parameters; raises InvalidRequest."""

    def sampling(self, *, max_tokens: int | None, **others: Any) -> SamplingParams:
        """The sampling parameters that both routes have, and others; raises InvalidRequest."""
        return sampling_params(
            {
                **self.said(),
                "max_tokens": max_tokens,
                "temperature": self._default_temperature if self.temperature is None else self.temperature,
                "best_of": self.num_drawn if self.num_drawn > self.num_choices else 1,
                "top_k": self.top_k or 0,
                "stop": self.stop,
                # OpenAI's seeds are signed.
                "seed": None if self.seed is None else self.seed % 2**64,
                "logprob_token_ids": self.logprob_token_ids,
                "prompt_logprobs": self.prompt_logprobs,
                "structured_outputs": self.form_beside(self.response_format, field="response_format"),
                **others,
            }
        )

    def detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """A fresh detokenizer for an answer, as the request wants its text."""
        return tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
        )

    @property
    def _default_temperature(self) -> float:
        return 0.0 if self.use_beam_search else 1.0

    @property
    def num_choices(self) -> int:
        """How many answers to each prompt are returned."""
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """How many answers to each prompt are made, of which the likeliest are returned."""
        return self.best_of or self.num_choices

    def names(self) -> dict[str, str]:
        """Our names of what can be wrong, and this request's."""
        return {"structured_outputs": "response_format"} if self.structured_outputs is None else {}

    @property
    def model_name(self) -> str | None:
        """The model's name; None: the only one."""
        return None if self.model in _ANY_MODEL else self.model

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse what we do not honour.

        Raises:
            InvalidRequest: a field asks for something that OpenAI has and we do not, or two contradict.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.neutral and value is not None and value not in self.neutral[name]:
                remedy = _REMEDIES.get(name, "leave it out")
                raise InvalidRequest(f"{name} is not supported", field=name, remedy=remedy)
        if self.num_drawn < self.num_choices:
            raise InvalidRequest("best_of must be at least n", field="best_of")
        if self.stream and self.num_drawn > self.num_choices:
            raise InvalidRequest("best_of cannot be streamed", field="best_of", remedy="leave stream out")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", field="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs needs stream: false", field="prompt_logprobs")

    def unknown(self) -> list[str]:
        """The fields that nobody knows."""
        return [name for name in self.model_extra or {} if name not in self.neutral and name not in _INERT]
