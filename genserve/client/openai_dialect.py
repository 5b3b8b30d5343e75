"""OpenAI dialect: writes and reads the bodies of /v1/chat/completions and /v1/completions.

Fields that OpenAI does not have (`top_k`, `repetition_penalty`, `return_token_ids`, `stop_reason` ...) have
vLLM's names. Tokens are named by their ids (vLLM's `return_tokens_as_token_ids`), since texts are ambiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from genserve.completion import (
    CacheMatch,
    CacheMatchEnd,
    Completion,
    Delta,
    FinishReason,
    PromptProgress,
    StopReason,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    TopTokens,
    Usage,
    joined_calls,
)
from genserve.prompt import Chat
from genserve.sampling.sampling_params import SamplingParams

_PREFIX = "token_id:"


def token_id_of(name: str) -> int:
    """Return ID from `token_id:ID`, a token's name with `return_tokens_as_token_ids`; raises ValueError."""
    return int(name.removeprefix(_PREFIX))


def read_logprob(value: float | None) -> float:
    """Read a log-probability. null means nan: a decoding loop chose the token itself."""
    return math.nan if value is None else value


def read_prompt_logprobs(
    prompt_ids: Sequence[int], entries: Sequence[Mapping[str, Mapping[str, Any]] | None]
) -> tuple[TokenLogprob, ...]:
    """Read the reply to `prompt_logprobs`, empty if not requested. The first token has no log-probability.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    return tuple(
        _token_logprob(token_id, entry)
        for token_id, entry in zip(prompt_ids, entries, strict=bool(entries))
        if entry is not None
    )


def _token_logprob(token_id: int, entry: Mapping[str, Mapping[str, Any]]) -> TokenLogprob:
    ranked = sorted((token["rank"], int(i), token["logprob"]) for i, token in entry.items() if token["rank"])
    return TokenLogprob(
        logprob=entry[str(token_id)]["logprob"], top=tuple((i, logprob) for _, i, logprob in ranked)
    )


def chat_body(chat: Chat, *, model: str | None, params: SamplingParams) -> dict[str, Any]:
    """Return the body of /v1/chat/completions, always with a temperature: the dialect's default is 1."""
    return {
        **({} if model is None else {"model": model}),
        **template_body(chat),
        **_tool_fields(chat),
        **params.given(),
        **({"return_tokens_as_token_ids": True} if _wants_alternatives(params) else {}),
        "temperature": params.temperature,
        "return_token_ids": True,
        "separate_reasoning": False,    # the text is the whole answer, as with `LLM`
    }


def template_body(chat: Chat) -> dict[str, Any]:
    """Return the part of a body that the chat template reads."""
    tools = {"tools": [tool.as_dict() for tool in chat.tools]} if chat.tools else {}
    messages = [message.as_dict() for message in chat.messages]
    return {"messages": messages, **tools, **_template_fields(chat)}


def _tool_fields(chat: Chat) -> dict[str, Any]:
    """Return the fields for tools and the choice of a tool; empty without tools."""
    if not chat.tools:
        return {}
    choice: Any = chat.tool_choice
    if chat.allowed_tools:
        named = [{"type": "function", "function": {"name": name}} for name in chat.allowed_tools]
        allowed = {"mode": chat.tool_choice, "tools": named}
        choice = {"type": "allowed_tools", "allowed_tools": allowed} if choice != "none" else choice
    return {"tool_choice": choice, "parallel_tool_calls": chat.parallel_tool_calls}


def _tool_call(call: Mapping[str, Any]) -> ToolCallDelta:
    """Return a tool call, or a part of it."""
    function = call.get("function") or {}
    return ToolCallDelta(
        index=call["index"],
        id=call.get("id") or "",
        name=function.get("name") or "",
        arguments=function.get("arguments") or "",
    )


def _template_fields(chat: Chat) -> dict[str, Any]:
    """Return the fields for the chat template that are set."""
    fields = {
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message or None,
        "chat_template_kwargs": dict(chat.template_kwargs) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def read_completion(reply: Mapping[str, Any], *, params: SamplingParams) -> Completion:
    """Read the reply of /v1/chat/completions, not streamed.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    choice = reply["choices"][0]
    token_ids, usage = _token_ids(choice), _usage(reply)
    if params.best_of > 1:  # the usage of the reply includes the discarded answers
        usage = replace(usage, completion_tokens=len(token_ids))
    calls = choice["message"].get("tool_calls") or ()
    return Completion(
        text=choice["message"]["content"] or "",
        tool_calls=joined_calls(_tool_call({**call, "index": i}) for i, call in enumerate(calls)),
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


class ChatChunks:
    """Reads the chunks of one streamed answer, in order.

    The finish reason comes in one chunk and the usage in a later one; the last delta has both.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._finish_reason: FinishReason | None = None
        self._stop_reason: StopReason | None = None

    def read(self, chunk: Mapping[str, Any]) -> Delta | None:
        """Return the delta of a chunk; None: it adds no delta. Raises the errors of `read_completion`."""
        # The chunk with the usage has no choice.
        choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
        if choice.get("finish_reason"):
            self._finish_reason, self._stop_reason = finish_reason_of(choice), choice.get("stop_reason")
        delta = Delta(
            text=choice["delta"].get("content") or "",
            tool_calls=tuple(map(_tool_call, choice["delta"].get("tool_calls") or ())),
            token_ids=_token_ids(choice),
            logprobs=_logprobs(choice, self._params),
            top_logprobs=_top_logprobs(choice, self._params),
        )
        if self._finish_reason and chunk.get("usage"):
            return replace(
                delta,
                finish_reason=self._finish_reason,
                stop_reason=self._stop_reason,
                usage=_usage(chunk),
            )
        if delta.text or delta.token_ids or delta.tool_calls:
            return delta
        return _progress(chunk.get("prompt_progress"))


def _progress(reported: Mapping[str, Any] | None) -> PromptProgress | None:
    if reported is None:
        return None
    return PromptProgress(
        prompt_tokens=reported["total"],
        cached_tokens=reported["cache"],
        read_tokens=reported["processed"],
        seconds=reported["time_ms"] / 1000,
    )


def _token_ids(choice: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(choice.get("token_ids") or ())


def _logprobs(choice: Mapping[str, Any], params: SamplingParams) -> tuple[float, ...]:
    found = choice.get("logprobs")
    if not params.logprobs or not found:
        return ()
    return tuple(read_logprob(entry["logprob"]) for entry in found["content"])


def _wants_alternatives(params: SamplingParams) -> bool:
    return bool(params.top_logprobs or params.logprob_token_ids)


def _top_logprobs(choice: Mapping[str, Any], params: SamplingParams) -> tuple[TopTokens, ...]:
    found = choice.get("logprobs")
    if not _wants_alternatives(params) or not found:
        return ()
    tops = (entry["top_logprobs"] for entry in found["content"])
    return tuple(tuple((token_id_of(token["token"]), token["logprob"]) for token in top) for top in tops)


def finish_reason_of(choice: Mapping[str, Any]) -> FinishReason:
    """Return the finish reason of a choice."""
    reason = choice["finish_reason"]
    return FinishReason(reason) if reason in set(FinishReason) else FinishReason.STOP   # "tool_calls"


def _usage(reply: Mapping[str, Any]) -> Usage:
    usage = reply["usage"]
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        timings=read_timings(reply),
        cache_match=read_cache_match(reply),
        receipt=reply.get("receipt"),
    )


def read_timings(reply: Mapping[str, Any]) -> Timings | None:
    """Return the timings that an object of an answer has; None: it has none, or not those of genserve."""
    timings = reply.get("timings") or {}
    if "queue_ms" not in timings:
        return None
    return Timings(
        queue_s=timings["queue_ms"] / 1000,
        prefill_s=timings["prompt_ms"] / 1000,
        decode_s=timings["predicted_ms"] / 1000,
        drafted_tokens=timings.get("draft_n", 0),
        accepted_tokens=timings.get("draft_n_accepted", 0),
    )


def read_cache_match(reply: Mapping[str, Any]) -> CacheMatch | None:
    """Return how far the prompt was cached; None: the request did not ask."""
    match = reply.get("cache_match")
    if match is None:
        return None
    return CacheMatch(
        matched_tokens=match["matched_n"],
        end=CacheMatchEnd(match["end"]),
        prompt_token_ids=tuple(match.get("prompt", {}).get("tokens", ())),
        cached_token_ids=tuple(match.get("cached", {}).get("tokens", ())),
    )


def completions_body(
    prompts: Sequence[str] | Sequence[Sequence[int]], *, n: int, model: str | None, params: SamplingParams
) -> dict[str, Any]:
    """Return the body of /v1/completions, always with a temperature: the dialect's default is 1."""
    changed = params.given()
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
    """Read the reply of /v1/completions: the answers in the order of the prompts.

    Raises:
        LookupError, TypeError, ValueError: the reply has another shape.
    """
    receipt = reply.get("receipt")      # of the only answer
    return tuple(_completion(choice, params, receipt) for choice in reply["choices"])


def _completion(
    choice: Mapping[str, Any], params: SamplingParams, receipt: Mapping[str, Any] | None
) -> Completion:
    prompt_ids, token_ids = tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])
    scores = choice["logprobs"] or {}
    tops: tuple[TopTokens, ...] = ()
    if _wants_alternatives(params):
        tops = tuple(_completion_top(logprobs or {}, params) for logprobs in scores["top_logprobs"])
    return Completion(
        text=choice["text"],
        prompt_token_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=tuple(map(read_logprob, scores.get("token_logprobs", ()))),
        top_logprobs=tops,
        prompt_logprobs=read_prompt_logprobs(prompt_ids, choice.get("prompt_logprobs") or ()),
        finish_reason=finish_reason_of(choice),
        stop_reason=choice.get("stop_reason"),
        usage=Usage(
            prompt_tokens=len(prompt_ids), completion_tokens=len(token_ids), receipt=receipt
        ),
    )


def _completion_top(logprobs: Mapping[str, float], params: SamplingParams) -> TopTokens:
    """Read the requested alternatives; the reply has the chosen token as well."""
    pairs = ((token_id_of(name), logprob) for name, logprob in logprobs.items())
    top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    if params.logprob_token_ids:
        return tuple(pair for pair in top if pair[0] in params.logprob_token_ids)
    return tuple(top[: params.top_logprobs])
