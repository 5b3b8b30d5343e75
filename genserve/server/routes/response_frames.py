"""Response frames: a streamed response, from `response.created` to `response.completed`."""

from __future__ import annotations

import time
from typing import Any

from genserve.completion import Delta, FinishReason, Usage
from genserve.errors import GenserveError, InvalidRequest, Overloaded
from genserve.server.error_responses import openai_error
from genserve.server.generation_handler import SubmittedRequest
from genserve.server.routes.logprob_formats import ScoredToken, TokenScores
from genserve.server.routes.response_events import ItemStatus, OutputItems
from genserve.server.routes.response_request import ResponseRequest

_COMPLETE = (FinishReason.END_OF_SEQUENCE, FinishReason.STOP_STRING)


class ResponseFrames:
    """The events of a streamed response; a whole response is what they add up to.

    Attributes:
        response: the response object as it is.
    """

    def __init__(self, submitted: SubmittedRequest, request: ResponseRequest) -> None:
        self.response = request.response(submitted)
        self._request = request
        self._items = OutputItems()
        self._parser = submitted.message_parser()
        self._token_ids: list[int] = []         # if there is a parser
        self._scores: TokenScores | None = None
        if request.body.has_logprobs:
            self._scores = TokenScores(request.body.detokenizer(submitted.model.tokenizer))
        self._scored: list[ScoredToken] = []    # tokens whose text is not in the message yet

    def start(self) -> bytes:
        """See `Frames`."""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._items.event(kind, {"response": self.response}) for kind in kinds)

    def delta(self, delta: Delta) -> bytes:
        """See `Frames`."""
        if self._scores is not None:
            self._scored += self._scores.answer(delta)
        if self._parser is None:
            text = delta.text
            events = self._items.add_content(text, scores=self._scores_of(text)) if text else b""
        else:
            self._token_ids += delta.token_ids
            read = self._parser.push(delta.text, last=delta.finish_reason is not None)
            events = self._items.add(read, scores=self._scores_of(read.content))
        if delta.finish_reason is None:
            return events
        assert delta.usage is not None
        return events + self._ending(delta.finish_reason, delta.usage)

    def error(self, error: GenserveError) -> bytes:
        """See `Frames`."""
        fields = openai_error(error)["error"]
        code = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        elif isinstance(error, InvalidRequest):
            code = "invalid_prompt"
        told = {name: fields[name] for name in ("code", "message", "param")}
        events = self._items.event("error", told)
        return events + self._end("failed", error={"code": code, "message": fields["message"]})

    def end(self) -> bytes:
        """See `Frames`."""
        return b""

    def _scores_of(self, content: str) -> list[ScoredToken]:
        """Return the tokens of new content; those before it were reasoning, calls, or had no text."""
        if not content:
            return []
        scored, self._scored = self._scored, []
        num_chars, first = 0, len(scored)
        while first and num_chars < len(content):
            first -= 1
            num_chars += len(scored[first].text)
        return scored[first:]

    def _ending(self, reason: FinishReason, usage: Usage) -> bytes:
        status: ItemStatus = "completed" if reason in _COMPLETE else "incomplete"
        events = self._items.close(status)
        num_reasoning = self._parser.num_reasoning_tokens(self._token_ids) if self._parser else 0
        self.response["usage"] = _usage(usage, num_reasoning=num_reasoning)
        if status == "completed":
            return events + self._end(status, completed_at=int(time.time()))
        return events + self._end(status, incomplete_details={"reason": "max_output_tokens"})

    def _end(self, status: str, **fields: Any) -> bytes:
        self.response |= {"status": status, "output": self._items.items, **fields}
        if status != "failed":
            self._request.save(self.response)
        return self._items.event(f"response.{status}", {"response": self.response})


def _usage(usage: Usage, *, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
