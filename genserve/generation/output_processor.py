"""Output processor: turns the logits of a step into tokens, answers and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from genserve.completion import FinishReason
from genserve.errors import SEE_LOG, GenserveError, InvalidRequest, ModelFailed, NotResumable
from genserve.generation.engine_request import Awaited, LogitsRequest, Request, SequenceSearch, TokenSequence
from genserve.generation.kv_cache_manager import KVCacheManager
from genserve.generation.scheduler import SchedulerOutput
from genserve.generation.speculation import Speculation
from genserve.sampling.batch_sampler import sample
from genserve.sampling.logits_array import LogitsArray, on_host, select_rows

logger = logging.getLogger(__name__)

DecodeFunction = Callable[[TokenSequence], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step.

    Attributes:
        generated: sequences that got a token, or ended.
        answered: logits requests and their rows, which belong to the receivers.
        failed: requests that cannot continue, and why.
        num_accepted: how many drafted tokens were accepted.
    """

    generated: dict[TokenSequence, None] = field(default_factory=dict)
    answered: list[tuple[LogitsRequest, LogitsArray]] = field(default_factory=list)
    failed: dict[Request, GenserveError] = field(default_factory=dict)
    num_accepted: int = 0


class OutputProcessor:
    """Passes the logits of a step to the requests whose tokens are all computed; a `LogitsConsumer`.

    Belongs to the engine's thread.
    """

    def __init__(
        self, kv_cache_manager: KVCacheManager, loops: DecodingLoops, *, speculation: Speculation | None
    ) -> None:
        """Continue the sequences of `loops`; `speculation` learns which drafted tokens were accepted."""
        self._kv = kv_cache_manager
        self._loops = loops
        self._speculation = speculation
        self._outputs = StepOutputs()
        # Requests by kind, and the rows that they get; filled by the methods of `LogitsConsumer`.
        self._generating: list[tuple[TokenSequence, int]] = []
        self._answering: list[tuple[LogitsRequest, int]] = []
        self._searching: dict[SequenceSearch, dict[Request, int]] = {}

    def process(self, output: SchedulerOutput, logits: LogitsArray, num_rows: Sequence[int]) -> StepOutputs:
        """Count the computed tokens, and continue every request that has no more pending ones.

        `logits` are [R, V] float32, and overwritten; `num_rows` are the numbers of rows of the requests.
        """
        self._outputs = StepOutputs()
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
            self._verify(logits, drafted)
        return self._outputs

    def generate(self, sequence: TokenSequence, row: int) -> None:
        """See `LogitsConsumer`."""
        self._generating.append((sequence, row))

    def answer(self, request: LogitsRequest, row: int) -> None:
        """See `LogitsConsumer`."""
        self._answering.append((request, row))

    def search(self, search: SequenceSearch, beam: Request, row: int) -> None:
        """See `LogitsConsumer`."""
        self._searching.setdefault(search, {})[beam] = row

    def _give(self, logits: LogitsArray, ready: Sequence[tuple[Request, int]]) -> None:
        """Give each of these requests the row after its last token."""
        for request, row in ready:
            request.give_logits(self, row)
        if self._answering:
            # Indexing with a list copies, in numpy and in torch; the next step overwrites the buffer.
            rows = logits[[row for _, row in self._answering]]
            self._outputs.answered += [(r, row) for (r, _), row in zip(self._answering, rows, strict=True)]
            self._answering.clear()
        if self._generating:
            self._generate(logits, self._generating)
            self._generating.clear()
        for search, row_of in self._searching.items():
            self._search(search, logits[[row_of[beam] for beam in search.beams if beam in row_of]])
        self._searching.clear()

    def _verify(self, logits: LogitsArray, drafted: list[tuple[Request, int, Sequence[int]]]) -> None:
        """Continue each sequence as long as its tokens are the drafted ones."""
        assert self._speculation is not None
        num_accepted = {request: 0 for request, *_ in drafted}
        accepting = drafted
        for index in range(max(len(draft) for *_, draft in drafted)):
            accepting = [
                (request, row, draft)
                for request, row, draft in accepting
                if index < len(draft)
                and request.num_pending
                and request.token_ids[request.num_computed_tokens] == draft[index]
                and request not in self._outputs.failed
            ]
            for request, *_ in accepting:
                request.num_computed_tokens += 1
                num_accepted[request] += 1
            self._give(logits, [(r, row + index + 1) for r, row, _ in accepting if not r.num_pending])
        for request, _, draft in drafted:
            self._speculation.note_outcome(
                request, num_drafted=len(draft), num_accepted=num_accepted[request]
            )
        self._outputs.num_accepted = sum(num_accepted.values())

    def _generate(self, logits: LogitsArray, generating: Sequence[tuple[TokenSequence, int]]) -> None:
        """Resume each decoding loop with the value that it awaits."""
        generated, failed = self._outputs.generated, self._outputs.failed
        sampling: list[TokenSequence] = []
        rows: list[int] = []
        for sequence, row in generating:
            generated[sequence] = None
            try:
                awaited = self._loops.awaited(sequence)
                if sequence.num_pending:
                    continue  # the loop appended tokens when it started, and awaits the logits after them
                if awaited is Awaited.TOKEN:
                    sampling.append(sequence)
                    rows.append(row)
                elif awaited is Awaited.LOGITS:
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

    def _search(self, search: SequenceSearch, rows: LogitsArray) -> None:
        """Advance a beam search by one token, and move the blocks of its beams."""
        beams, failed = tuple(search.beams), self._outputs.failed
        try:
            reorder = search.step(on_host(rows))
        except NotResumable as error:
            failed.update(dict.fromkeys(search.answers, error))
            reorder = None
        except Exception:
            logger.exception("beam search failed")
            failed.update(dict.fromkeys(search.answers, ModelFailed("beam search failed", remedy=SEE_LOG)))
            reorder = None
        else:
            if reorder is None:
                failed.update(dict.fromkeys(search.answers, _not_finite(search.answers[0])))
        for source, target in reorder.copies if reorder else ():
            self._kv.fork(source, target)
        for beam in reorder.leaving if reorder else beams:
            self._kv.free(beam)
        if reorder is not None:
            self._outputs.generated |= dict.fromkeys(search.answers)


def _score(request: Request, logits: LogitsArray, rows: range) -> None:
    """Give a request the rows after its last computed tokens, one after the other."""
    request.num_computed_tokens -= len(rows)
    for row in rows:
        request.num_computed_tokens += 1
        request.score(logits, row)


# The parameters that forbid tokens.
_FORBIDDING = ("allowed_token_ids", "suppress_tokens", "bad_words", "min_tokens", "no_repeat_ngram_size")


def _not_finite(sequence: TokenSequence) -> GenserveError:
    if sequence.plugins.failure is not None:
        return sequence.plugins.failure
    grammar = sequence.sampling.grammar
    if grammar is not None and (failure := grammar.failure):
        field = "tools" if sequence.params.structured_outputs is None else "structured_outputs"
        message = f"{field} became too complex: {failure}"
        return InvalidRequest(message, field=field, remedy="simplify the grammar")
    params = sequence.params
    forbidding = [name for name in _FORBIDDING if getattr(params, name)]
    if grammar is not None:
        forbidding.append("structured_outputs")
    if not forbidding and not params.logits_processors:
        return ModelFailed("the model's logits are not finite")
    if not forbidding:
        return ModelFailed("the model's logits are not finite, or the logits processors leave no token")
    names = ", ".join(forbidding)
    return InvalidRequest(
        f"the request leaves no token to sample: {names}", field=forbidding[0], remedy="relax one of them"
    )


class DecodingLoops:
    """One coroutine of the repository's `decode` per token sequence. Belongs to the engine's thread.

    A loop is a plain coroutine without an event loop: it can only await the next token or the next row of
    logits, and the engine resumes it with it.
    """

    def __init__(self, decode: DecodeFunction) -> None:
        self._decode = decode
        self._loops: dict[Request, Coroutine[Any, Any, None]] = {}
        self._awaited: dict[Request, Awaited] = {}

    def __len__(self) -> int:
        return len(self._loops)

    def awaited(self, sequence: TokenSequence) -> Awaited | None:
        """Return the value that the sequence's loop awaits; None if it has ended. Starts a new loop.

        Raises:
            GenserveError: the loop failed before its first await.
        """
        if sequence not in self._loops:
            self._loops[sequence] = self._decode(sequence)
            self._advance(sequence, None)
        return self._awaited.get(sequence)

    def resume(self, sequence: TokenSequence, value: Any) -> None:
        """Send the loop the value that it awaits, and run it to its next await or its end.

        Raises:
            GenserveError: the loop raised, awaited something else, or did not append a token.
        """
        self._advance(sequence, value)
        if sequence.finish_reason is None and sequence.num_pending == 0:
            raise ModelFailed(
                "the decoding loop awaited again without appending a token",
                remedy="call sequence.append() after each await",
            )

    def drop(self, request: Request) -> None:
        """Close the loop of a finished or removed request; does nothing if it has none."""
        self._awaited.pop(request, None)
        loop = self._loops.pop(request, None)
        if loop is None:
            return
        try:
            loop.close()
        except BaseException:  # its `finally` raised, or it awaited again; no request can receive the error
            logger.exception("decoding loop failed while it was closed")

    def _advance(self, sequence: TokenSequence, value: Any) -> None:
        try:
            awaited = self._loops[sequence].send(value)
        except StopIteration:
            self._awaited.pop(sequence, None)
            if not sequence.finished:
                sequence.finish(FinishReason.END_OF_SEQUENCE)
            return
        except GenserveError:
            raise
        except BaseException as error:  # sys.exit() in a model.py must not end the engine's thread
            logger.exception("decoding loop failed")
            raise ModelFailed("the decoding loop failed", remedy=SEE_LOG) from error
        if not isinstance(awaited, Awaited):
            logger.error("decoding loop awaited a %s", type(awaited).__name__)
            raise ModelFailed(
                "the decoding loop awaited neither a token nor logits",
                remedy="`decode` may await sequence.sample() and sequence.logits(), nothing else",
            )
        self._awaited[sequence] = awaited
