"""Timings: how a dialect writes how long the parts of an answer took, and how much of its prompt was read.

The objects are those of llama.cpp's server, of which clients know the form:
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. Its dialects are OpenAI's; the
other dialects have the objects as fields of their own answers and events, whose clients ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.completion import PromptProgress, Timings, Usage
from genserve.server.dialects.generation_handler import SubmittedRequest


def prompt_progress(progress: PromptProgress) -> dict[str, int]:
    """Return the object `prompt_progress`; its time is in milliseconds."""
    return {
        "total": progress.prompt_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.read_tokens,
        "time_ms": round(1000 * progress.seconds),
    }


def timings_fields(usages: Sequence[Usage], *, num_drawn: int = 1) -> dict[str, Any]:
    """Return the field `timings` for some answers, `num_drawn` per prompt; {}: they are not known.

    Counts are those of all answers together, and a prompt counts once; times are the longest, in
    milliseconds. A rate is 0 if there was nothing to measure. The rate of the answers does not include their
    first tokens, which belong to the prompt's time.
    """
    known = [usage.timings for usage in usages if usage.timings is not None]
    if len(known) < len(usages) or not known:
        return {}
    firsts, together = usages[::num_drawn], Timings.of_all(known)
    num_cached = num_read = 0
    for usage in firsts:
        num_cached += usage.cached_tokens
        num_read += usage.prompt_tokens - usage.cached_tokens
    num_new = sum([usage.completion_tokens for usage in usages])
    num_later = max(0, num_new - len(usages))
    prefill_ms, decode_ms = 1000 * together.prefill_s, 1000 * together.decode_s
    timings = {
        "queue_ms": round(1000 * together.queue_s, 3),      # ours
        "cache_n": num_cached,
        "prompt_n": num_read,
        "prompt_ms": round(prefill_ms, 3),
        "prompt_per_token_ms": round(prefill_ms / num_read, 3) if num_read else 0.0,
        "prompt_per_second": round(1000 * num_read / prefill_ms, 3) if prefill_ms else 0.0,
        "predicted_n": num_new,
        "predicted_ms": round(decode_ms, 3),
        "predicted_per_token_ms": round(decode_ms / num_later, 3) if num_later else 0.0,
        "predicted_per_second": round(1000 * num_later / decode_ms, 3) if decode_ms else 0.0,
    }
    if together.drafted_tokens:
        timings |= {"draft_n": together.drafted_tokens, "draft_n_accepted": together.accepted_tokens}
    return {"timings": timings}


def requested_fields(submitted: SubmittedRequest, usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the fields `receipt` and `cache_match` of an answer, those of its first prompt, if it asked.

    The tokens of the cached prompt are missing for a client without an API key whom other machines share.
    """
    receipt = usages[0].receipt if usages else None
    fields: dict[str, Any] = {} if receipt is None else {"receipt": receipt}
    match = usages[0].cache_match if usages else None
    if match is None:
        return fields
    written: dict[str, Any] = {"matched_n": match.matched_tokens, "end": match.end}
    parts = {"prompt": match.prompt_token_ids}
    if submitted.may_show_cached:
        parts["cached"] = match.cached_token_ids
    for name, token_ids in parts.items():
        if token_ids:
            text = submitted.model.tokenizer.decode(token_ids, skip_special_tokens=False)
            written[name] = {"tokens": list(token_ids), "text": text}
    return fields | {"cache_match": written}
