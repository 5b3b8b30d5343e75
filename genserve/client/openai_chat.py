"""OpenAI chat: the bodies of /v1/chat/completions, written and read.

What OpenAI has no name for (`top_k`, `repetition_penalty`, `return_token_ids`, `stop_reason` ...) has
vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from genserve.client.scored_tokens import read_logprob, read_prompt_logprobs, token_id_of
from genserve.request import Chat, Completion, Delta, FinishReason, StopReason, TopTokens, Usage
from genserve.sampling.params import SamplingParams

__all__ = ["AnswerEvents", "finish_reason_of", "read_completion", "request_body"]


def request_body(chat: Chat, *, model: str | None, params: SamplingParams) -> dict[str, Any]:
    """Return the body; the temperature is always sent, for its default is 1 in this dialect."""
    return {
        **({} if model is None else {"model": model}),
        "messages": [message.as_dict() for message in chat.messages],
        **_template_fields(chat),
        **params.changed(),
        **({"return_tokens_as_token_ids": True} if _wants_others(params) else {}),
        "temperature": params.temperature,
        "return_token_ids": True,
        "separate_reasoning": False,    # the text is the whole answer, as that of `LLM` is
    }


def _template_fields(chat: Chat) -> dict[str, Any]:
    """Return what the chat says to its template, if anything."""
    fields = {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message or None,
        "chat_template_kwargs": dict(chat.template_kwargs) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def read_completion(reply: Mapping[str, Any], *, params: SamplingParams) -> Completion:
    """Read a reply that is not streamed.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    choice = reply["choices"][0]
    token_ids, usage = _token_ids(choice), _usage(reply["usage"])
    if params.best_of > 1:  # the reply counts the answers that it leaves out, too
        usage = replace(usage, completion_tokens=len(token_ids))
    return Completion(
        text=choice["message"]["content"],
        token_ids=token_ids,
        logprobs=_logprobs(choice, params),
        top_logprobs=_top_logprobs(choice, params),
        prompt_logprobs=read_prompt_logprobs(
            reply.get("prompt_token_ids") or (), reply.get("prompt_logprobs") or ()
        ),
        finish_reason=finish_reason_of(choice),
        stop_reason=choice.get("stop_reason"),
        usage=usage,
    )


class AnswerEvents:
    """Reads the chunks of one streamed answer, in their order.

    The reason of the end comes in one chunk and the usage in a later one; the last delta has both.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._finish_reason: FinishReason | None = None
        self._stop_reason: StopReason | None = None

    def read(self, chunk: Mapping[str, Any]) -> Delta | None:
        """Return what the chunk adds, None if nothing. Raises what `read_completion` raises."""
        # The chunk with the usage has no choice.
        choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
        if choice.get("finish_reason"):
            self._finish_reason, self._stop_reason = finish_reason_of(choice), choice.get("stop_reason")
        delta = Delta(
            text=choice["delta"].get("content") or "",
            token_ids=_token_ids(choice),
            logprobs=_logprobs(choice, self._params),
            top_logprobs=_top_logprobs(choice, self._params),
        )
        if self._finish_reason and chunk.get("usage"):
            return replace(
                delta,
                finish_reason=self._finish_reason,
                stop_reason=self._stop_reason,
                usage=_usage(chunk["usage"]),
            )
        return delta if delta.text or delta.token_ids else None


def _token_ids(choice: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(choice.get("token_ids") or ())


def _logprobs(choice: Mapping[str, Any], params: SamplingParams) -> tuple[float, ...]:
    found = choice.get("logprobs")
    if not params.logprobs or not found:
        return ()
    return tuple(read_logprob(entry["logprob"]) for entry in found["content"])


def _wants_others(params: SamplingParams) -> bool:
    return bool(params.top_logprobs or params.logprob_token_ids)


def _top_logprobs(choice: Mapping[str, Any], params: SamplingParams) -> tuple[TopTokens, ...]:
    found = choice.get("logprobs")
    if not _wants_others(params) or not found:
        return ()
    tops = (entry["top_logprobs"] for entry in found["content"])
    return tuple(tuple((token_id_of(one["token"]), one["logprob"]) for one in top) for top in tops)


def finish_reason_of(choice: Mapping[str, Any]) -> FinishReason:
    """Return why a choice ended, which `stop_reason` tells more of."""
    if choice["finish_reason"] in ("length", "repetition"):
        return FinishReason(choice["finish_reason"])
    # The string, or the id of the token, that ended the text; null after the end of the sequence.
    stopped_by = choice.get("stop_reason")
    return FinishReason.STOP_STRING if isinstance(stopped_by, str) else FinishReason.END_OF_SEQUENCE


def _usage(usage: Mapping[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )
