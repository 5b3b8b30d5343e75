"""TGI dialect: writes and reads the bodies of /generate and /generate_stream.

The bodies have the shape of Text Generation Inference; genserve adds `cached_tokens`, `stop_reason`, `model`
and the parameters that have vLLM's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genserve.client.openai_dialect import read_cache_match, read_logprob, read_timings
from genserve.completion import Completion, Delta, FinishReason, TopTokens, Usage
from genserve.sampling.sampling_params import DRAW_PARAMETERS, PARAMETERS, SamplingParams


def request_body(prompt: str, *, model: str | None, params: SamplingParams) -> dict[str, Any]:
    """Return the body of either route, without disabled parameters: TGI has no value for "disabled"."""
    changed = params.given()
    changed.pop("logprobs", None)  # the details always have them
    for name in ("max_tokens", "top_logprobs"):
        if name in changed:
            changed[str(PARAMETERS[name].tgi)] = changed.pop(name)
    if changed.get("top_k") == 0:
        changed["top_k"] = 2**31 - 1     # all
    if params.temperature == 0:  # TGI samples as soon as one of these is set, even without do_sample
        changed = {name: value for name, value in changed.items() if name not in DRAW_PARAMETERS}
    parameters = {"details": True, "do_sample": params.temperature > 0, **changed}
    body = {"inputs": prompt, "parameters": parameters}
    return body if model is None else body | {"model": model}


def read_completion(
    reply: Mapping[str, Any], *, prompt_tokens: int, cached_tokens: int, params: SamplingParams
) -> Completion:
    """Read the reply of /generate.

    Args:
        reply: the body, which has `details`.
        prompt_tokens: the number in the header x-prompt-tokens; the body does not have it.
        cached_tokens: the number in the header x-cached-tokens.
        params: the sampling parameters of the request.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    details = reply["details"]
    return Completion(
        text=reply["generated_text"],
        token_ids=tuple(token["id"] for token in details["tokens"]),
        logprobs=_logprobs(details["tokens"], params),
        top_logprobs=_top_logprobs(details.get("top_tokens") or ()),
        finish_reason=_finish_reason(details),
        stop_reason=details.get("stop_reason"),
        usage=Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=details["generated_tokens"],
            cached_tokens=cached_tokens,
            timings=read_timings(details),
            cache_match=read_cache_match(details),
            receipt=details.get("receipt"),
        ),
    )


class GenerateEvents:
    """Reads the events of one answer of /generate_stream, in order."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._num_chars = 0

    def read(self, event: Mapping[str, Any]) -> Delta | None:
        """Return the delta of an event. Raises the errors of `read_completion`."""
        token = event["token"]
        whole_text = event["generated_text"]
        finish_reason, stop_reason, usage = None, None, None
        if whole_text is None:
            text = token["text"]
        else:
            # Not the text of the last token: that may be the end-of-sequence token.
            text = whole_text[self._num_chars :]
            finish_reason = _finish_reason(event["details"])
            stop_reason = event["details"].get("stop_reason")
            usage = Usage(
                prompt_tokens=event["details"]["input_length"],
                completion_tokens=event["details"]["generated_tokens"],
                cached_tokens=event["details"].get("cached_tokens", 0),
                timings=read_timings(event["details"]),
                cache_match=read_cache_match(event["details"]),
                receipt=event["details"].get("receipt"),
            )
        self._num_chars += len(text)
        return Delta(
            text=text,
            token_ids=(token["id"],),
            logprobs=_logprobs([token], self._params),
            top_logprobs=_top_logprobs([event["top_tokens"]]) if event.get("top_tokens") else (),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=usage,
        )


def _finish_reason(details: Mapping[str, Any]) -> FinishReason:
    if details["finish_reason"] != "length":
        return FinishReason.STOP    # "eos_token" or "stop_sequence"
    # TGI has no word for a repetition.
    is_repetition = details.get("stop_reason") == "repetition_detected"
    return FinishReason.REPETITION if is_repetition else FinishReason.LENGTH


def _logprobs(tokens: list[Mapping[str, Any]], params: SamplingParams) -> tuple[float, ...]:
    return tuple(read_logprob(token["logprob"]) for token in tokens) if params.logprobs else ()


def _top_logprobs(tops: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[TopTokens, ...]:
    return tuple(tuple((token["id"], token["logprob"]) for token in top) for top in tops)
