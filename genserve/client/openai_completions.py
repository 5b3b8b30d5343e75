"""OpenAI completions: the bodies of /v1/completions, written and read.

Tokens are called by their ids, which is vLLM's `return_tokens_as_token_ids`: no text is without ambiguity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genserve.client.openai_chat import finish_reason_of
from genserve.client.scored_tokens import read_logprob, read_prompt_logprobs, token_id_of
from genserve.request import Completion, TopTokens, Usage
from genserve.sampling.params import SamplingParams

__all__ = ["read_completions", "request_body"]


def request_body(
    prompts: Sequence[str] | Sequence[Sequence[int]], *, n: int, model: str | None, params: SamplingParams
) -> dict[str, Any]:
    """Return the body; the temperature is always sent, for its default is 1 in this dialect."""
    changed = params.changed()
    changed.pop("top_logprobs", None)
    if changed.pop("logprobs", False):
        changed |= {"logprobs": params.top_logprobs, "return_tokens_as_token_ids": True}
    return {
        **({} if model is None else {"model": model}),
        "prompt": prompts,
        "n": n,
        **changed,
        "temperature": params.temperature,
        "return_token_ids": True,
    }


def read_completions(reply: Mapping[str, Any], *, params: SamplingParams) -> tuple[Completion, ...]:
    """Read a reply: the answers in the order of the prompts.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    return tuple(_completion(choice, params) for choice in reply["choices"])


def _completion(choice: Mapping[str, Any], params: SamplingParams) -> Completion:
    prompt_ids, token_ids = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])
    told = choice["logprobs"] or {}
    tops: tuple[TopTokens, ...] = ()
    if params.top_logprobs or params.logprob_token_ids:
        tops = tuple(_top(levels or {}, params) for levels in told["top_logprobs"])
    return Completion(
        text=choice["text"],
        prompt_token_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=tuple(map(read_logprob, told.get("token_logprobs", ()))),
        top_logprobs=tops,
        prompt_logprobs=read_prompt_logprobs(prompt_ids, choice.get("prompt_logprobs") or ()),
        finish_reason=finish_reason_of(choice),
        stop_reason=choice.get("stop_reason"),
        usage=Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(token_ids)),
    )


def _top(levels: Mapping[str, float], params: SamplingParams) -> TopTokens:
    """Read the others that were asked for; the token itself is beside them."""
    pairs = ((token_id_of(name), level) for name, level in levels.items())
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    if params.logprob_token_ids:
        return tuple(pair for pair in top if pair[0] in params.logprob_token_ids)
    return tuple(top[: params.top_logprobs])
