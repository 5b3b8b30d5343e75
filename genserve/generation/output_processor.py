"""Output processor: turns the logits of a step into tokens, answers and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from genserve.completion import FinishReason
from genserve.errors import SEE_LOG, GenserveError, InvalidRequest, ModelFailed
from genserve.generation.beam_search import Beam, BeamSearch
from genserve.generation.engine_request import LogitsRequest, Request, TokenSequence, Want
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.logits_model import LogitsArray, on_host
from genserve.generation.scheduler import SchedulerOutput
from genserve.generation.speculation import Speculation
from genserve.sampling.batch_sampler import sample
from genserve.sampling.sampler import select_rows

__all__ = ["DecodeFunction", "DecodingLoops", "OutputProcessor", "Outputs"]


logger = logging.getLogger(__name__)

DecodeFunction = Callable[[TokenSequence], Coroutine[Any, Any, None]]


class DecodingLoops:
    """The loops that are under way. Belongs to the engine's thread, which runs all of them.

    A loop is a plain coroutine without an event loop: it can wait for the next token or for the
    next row of logits, and the engine resumes it with just that.
    """

    def __init__(self, decode: DecodeFunction) -> None:
        self._decode = decode
        self._loops: dict[Request, Coroutine[Any, Any, None]] = {}
        self._wants: dict[Request, Want] = {}

    def __len__(self) -> int:
        return len(self._loops)

    def want(self, sequence: TokenSequence) -> Want | None:
        """Return what the sequence's loop waits for; None if it has ended. Starts it if need be.

        Raises:
            GenserveError: the loop failed in its first lines.
        """
        if sequence not in self._loops:
            self._loops[sequence] = self._decode(sequence)
            self._advance(sequence, None)
        return self._wants.get(sequence)

    def resume(self, sequence: TokenSequence, value: Any) -> None:
        """Hand the loop what it waits for, and run it up to its next wait or its end.

        Raises:
            GenserveError: the loop raised, or awaited something else, or did not append a token.
        """
        self._advance(sequence, value)
        if not sequence.finished and sequence.num_pending == 0:
            raise ModelFailed("the decoding loop waited again without appending a token")

    def drop(self, request: Request) -> None:
        """Close the loop of a request that leaves; fine if it has none."""
        self._wants.pop(request, None)
        loop = self._loops.pop(request, None)
        if loop is None:
            return
        try:
            loop.close()
        except BaseException:  # its `finally` raised, or it awaits again: nobody is left to be told
            logger.exception("decoding loop failed while it was closed")

    def _advance(self, sequence: TokenSequence, value: Any) -> None:
        try:
            want = self._loops[sequence].send(value)
        except StopIteration:
            self._wants.pop(sequence, None)
            if not sequence.finished:
                sequence.finish(FinishReason.END_OF_SEQUENCE)
            return
        except GenserveError:
            raise
        except BaseException as error:  # sys.exit() in a model.py must not end the engine's thread
            logger.exception("decoding loop failed")
            raise ModelFailed("the decoding loop failed", remedy=SEE_LOG) from error
        if not isinstance(want, Want):
            logger.error("decoding loop awaited a %s", type(want).__name__)
            raise ModelFailed(
                "the decoding loop awaited neither a token nor logits",
                remedy="`decode` may await sequence.sample() and sequence.logits(), nothing else",
            )
        self._wants[sequence] = want





@dataclass(slots=True)
class Outputs:
    """What a step has brought.

    Attributes:
        generated: sequences that have got a token, or ended.
        answered: requests for logits and their rows, each the receiver's own.
        failed: why these cannot go on.
        num_accepted: of the drafted tokens.
    """

    generated: dict[TokenSequence, None] = field(default_factory=dict)
    answered: list[tuple[LogitsRequest, LogitsArray]] = field(default_factory=list)
    failed: dict[Request, GenserveError] = field(default_factory=dict)
    num_accepted: int = 0


class OutputProcessor:
    """Gives each request of which all tokens are computed its token or its row; a `LogitsConsumer`.

    Belongs to the engine's thread.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        loops: DecodingLoops,
        *,
        speculation: Speculation | None,
    ) -> None:
        """Take what the engine is made of; see `Engine`."""
        self._kv = kv_cache_manager
        self._loops = loops
        self._speculation = speculation
        # Of the rows that are given now.
        self._outputs = Outputs()
        self._generating: list[tuple[TokenSequence, int]] = []
        self._answering: list[tuple[LogitsRequest, int]] = []
        self._searching: dict[BeamSearch, dict[Beam, int]] = {}

    def process(self, output: SchedulerOutput, logits: LogitsArray, num_rows: Sequence[int]) -> Outputs:
        """Count what a step has computed, and go on with all requests that have nothing left to compute.

        Args:
            output: what was run.
            logits: [R, V] float32; overwritten.
            num_rows: how many of these each request has.
        """
        self._outputs = Outputs()
        ready: list[tuple[Request, int]] = []
        drafted: list[tuple[Request, int, Sequence[int]]] = []
        end = 0
        steps = zip(output.requests, output.num_tokens, output.drafts, num_rows, strict=True)
        for request, num_tokens, draft, count in steps:
            end += count
            request.num_computed_tokens += num_tokens
            self._kv.cache_blocks(request)
            is_ready = not request.num_pending
            if count > 1 + len(draft) or (count and not is_ready):
                _score(request, logits, range(end - count, end))
            if is_ready:
                row = end - 1 - len(draft)
                ready.append((request, row))
                if draft:
                    drafted.append((request, row, draft))
        self._give(logits, ready)
        if drafted:
            self._follow(logits, drafted)
        return self._outputs

    def generate(self, sequence: TokenSequence, row: int) -> None:
        """See `LogitsConsumer`."""
        self._generating.append((sequence, row))

    def answer(self, request: LogitsRequest, row: int) -> None:
        """See `LogitsConsumer`."""
        self._answering.append((request, row))

    def search(self, beam: Beam, row: int) -> None:
        """See `LogitsConsumer`."""
        self._searching.setdefault(beam.search, {})[beam] = row

    def _give(self, logits: LogitsArray, ready: Sequence[tuple[Request, int]]) -> None:
        """Give each of these requests the row behind its last token."""
        for request, row in ready:
            request.take_logits(self, row)
        if self._answering:
            # To index with a list is to copy, for numpy and for torch: the buffer is the next step's.
            rows = logits[[row for _, row in self._answering]]
            self._outputs.answered += [(r, row) for (r, _), row in zip(self._answering, rows, strict=True)]
            self._answering.clear()
        if self._generating:
            self._generate(logits, self._generating)
            self._generating.clear()
        for search, row_of in self._searching.items():
            self._search(search, logits[[row_of[beam] for beam in search.beams if beam in row_of]])
        self._searching.clear()

    def _follow(self, logits: LogitsArray, drafted: list[tuple[Request, int, Sequence[int]]]) -> None:
        """Go on with each sequence as long as its tokens are those that were drafted."""
        assert self._speculation is not None
        num_accepted = {request: 0 for request, *_ in drafted}
        following = drafted
        for place in range(max(len(draft) for *_, draft in drafted)):
            following = [
                (request, row, draft)
                for request, row, draft in following
                if place < len(draft)
                and request.num_pending
                and request.token_ids[request.num_computed_tokens] == draft[place]
                and request not in self._outputs.failed
            ]
            for request, *_ in following:
                request.num_computed_tokens += 1
                num_accepted[request] += 1
            self._give(logits, [(r, row + place + 1) for r, row, _ in following if not r.num_pending])
        for request, _, draft in drafted:
            self._speculation.note_outcome(
                request, num_drafted=len(draft), num_accepted=num_accepted[request]
            )
        self._outputs.num_accepted = sum(num_accepted.values())

    def _generate(self, logits: LogitsArray, generating: Sequence[tuple[TokenSequence, int]]) -> None:
        """Run each decoding loop on with what it waits for."""
        generated, failed = self._outputs.generated, self._outputs.failed
        sampling: list[TokenSequence] = []
        rows: list[int] = []
        for sequence, row in generating:
            generated[sequence] = None
            try:
                want = self._loops.want(sequence)
                if sequence.num_pending:
                    continue  # it began with tokens of its own: these logits are not what it waits for
                if want is Want.SAMPLE:
                    sampling.append(sequence)
                    rows.append(row)
                elif want is Want.LOGITS:
                    self._loops.resume(sequence, logits[row])
            except GenserveError as error:
                failed[sequence] = error
        if sampling:
            self._sample(select_rows(logits, rows), sampling)

    def _sample(self, logits: LogitsArray, sequences: Sequence[TokenSequence]) -> None:
        failed = self._outputs.failed
        try:
            sampled = sample(logits, sequences)
        except Exception:
            logger.exception("sampling failed")
            failure = ModelFailed("sampling failed", remedy=SEE_LOG)
            failed.update(dict.fromkeys(sequences, failure))
            return
        for sequence, token in zip(sequences, sampled, strict=True):
            if not token.finite:
                failed[sequence] = _not_finite(sequence)
                continue
            if not sequence.sampling.plain:
                sequence.take_logprob(token.logprob)
                sequence.sampling.learn(token.surprise_bits)
            try:
                self._loops.resume(sequence, token.token_id)
            except GenserveError as error:
                failed[sequence] = error

    def _search(self, search: BeamSearch, rows: LogitsArray) -> None:
        """Move a beam search by one token."""
        beams, failed = tuple(search.beams), self._outputs.failed
        try:
            reorder = search.step(on_host(rows))
        except Exception:
            logger.exception("beam search failed")
            failed.update(dict.fromkeys(search.answers, ModelFailed("beam search failed", remedy=SEE_LOG)))
            reorder = None
        else:
            if reorder is None:
                failed.update(dict.fromkeys(search.answers, _not_finite(search.answers[0])))
        for copy in reorder.copies if reorder else ():
            self._kv.fork(copy.source, copy.target)
        for beam in reorder.leaving if reorder else beams:
            self._kv.free(beam)
        if reorder is not None:
            self._outputs.generated |= dict.fromkeys(search.answers)


def _score(request: Request, logits: LogitsArray, rows: range) -> None:
    """Give a request the logits behind its last computed tokens, one after the other."""
    request.num_computed_tokens -= len(rows)
    for row in rows:
        request.num_computed_tokens += 1
        request.score(logits, row)


def _not_finite(sequence: TokenSequence) -> GenserveError:
    if sequence.plugins.failure is not None:
        return sequence.plugins.failure
    grammar = sequence.sampling.grammar
    if grammar is not None and (failure := grammar.failure):
        message = f"structured_outputs became too much to follow: {failure}"
        return InvalidRequest(message, field="structured_outputs", remedy="ask for a simpler form")
    if grammar is None and not sequence.sampling.edits_logits:
        return ModelFailed("the model's logits are not finite")
    return ModelFailed(
        "the model's logits are not finite, or what the request forbids leaves no token",
        remedy="forbid less: allowed_token_ids, suppress_tokens, bad_words, min_tokens, no_repeat_ngram_size",
    )
