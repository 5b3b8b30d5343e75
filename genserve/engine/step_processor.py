"""Step processor: turns the logits of a step into tokens, rows of logits requests, and errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from genserve.engine.beam_search import Beam, BeamSearch
from genserve.engine.decoding_loops import DecodingLoops
from genserve.engine.engine_request import LogitsRequest, Request
from genserve.engine.kv_cache_manager import KVCacheManager
from genserve.engine.scheduler import SchedulerOutput
from genserve.engine.speculation import Speculation
from genserve.engine.token_sequence import Awaited, TokenSequence
from genserve.errors import SEE_LOG, GenserveError, InvalidRequest, ModelFailed, NotResumable
from genserve.sampling.batch_sampler import sample
from genserve.sampling.logits_array import LogitsArray, on_host, select_rows

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step.

    Attributes:
        generated: sequences that got a token, or ended.
        logits: logits requests and their rows, which belong to the receivers.
        failed: requests that cannot continue, and why.
        num_accepted: how many drafted tokens were accepted.
    """

    generated: dict[TokenSequence, None] = field(default_factory=dict)
    logits: list[tuple[LogitsRequest, LogitsArray]] = field(default_factory=list)
    failed: dict[Request, GenserveError] = field(default_factory=dict)
    num_accepted: int = 0


class StepProcessor:
    """Passes the logits of a step to the requests whose tokens are all computed.

    Belongs to the engine's thread.
    """

    def __init__(
        self, kv_cache_manager: KVCacheManager, loops: DecodingLoops, *, speculation: Speculation | None
    ) -> None:
        """Continue the sequences of `loops`; `speculation` is told which drafted tokens were accepted."""
        self._kv = kv_cache_manager
        self._loops = loops
        self._speculation = speculation
        self._outputs = StepOutputs()

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
            if not draft:
                self._kv.cache_blocks(request)
            is_ready = not request.num_pending
            if count > 1 + len(draft) or (count and not is_ready):
                _score(request, logits, range(end - count, end))
            if is_ready:
                row = end - 1 - len(draft)
                ready.append((request, row))
                if draft:
                    drafted.append((request, row, draft))
        self._continue(logits, ready)
        if drafted:
            self._verify(logits, drafted)
        return self._outputs

    def _continue(self, logits: LogitsArray, ready: Sequence[tuple[Request, int]]) -> None:
        """Continue each ready request with the row after its last token."""
        generating: list[tuple[TokenSequence, int]] = []
        ended: list[tuple[LogitsRequest, int]] = []
        searching: dict[BeamSearch, dict[Beam, int]] = {}
        for request, row in ready:
            match request:
                case TokenSequence():
                    generating.append((request, row))
                case LogitsRequest():
                    ended.append((request, row))
                case Beam():
                    searching.setdefault(request.group, {})[request] = row
        if ended:
            # Indexing with a list copies, in numpy and in torch; the next step overwrites the buffer.
            rows = logits[[row for _, row in ended]]
            self._outputs.logits += [(request, row) for (request, _), row in zip(ended, rows, strict=True)]
        if generating:
            self._generate(logits, generating)
        for search, row_of in searching.items():
            self._search(search, logits[[row_of[beam] for beam in search.beams if beam in row_of]])

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
            self._continue(logits, [(r, row + index + 1) for r, row, _ in accepting if not r.num_pending])
        for request, _, draft in drafted:
            if self._kv.has_states and num_accepted[request] < len(draft):
                self._kv.go_back(request)
            self._kv.cache_blocks(request)
            request.num_drafted_tokens += len(draft)
            request.num_accepted_tokens += num_accepted[request]
            self._speculation.record_outcome(
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
                if sequence.loop is None:
                    self._loops.start(sequence)
                    if sequence.num_pending:
                        continue  # the loop appended tokens when it started, and awaits the logits after them
                if sequence.receipt is not None:
                    sequence.receipt.add(logits[row])
                if sequence.awaited is Awaited.TOKEN:
                    sampling.append(sequence)
                    rows.append(row)
                elif sequence.awaited is Awaited.LOGITS:
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
                sequence.set_logprob(token.token_id, token.logprob)
                sequence.sampling.adapt(token.surprise_bits)
            try:
                self._loops.resume(sequence, token.token_id)
            except GenserveError as error:
                failed[sequence] = error

    def _search(self, search: BeamSearch, rows: LogitsArray) -> None:
        """Advance a beam search by one token, and move the blocks of its beams."""
        beams, failed = tuple(search.beams), self._outputs.failed
        try:
            reorder = search.step(on_host(rows))
        except NotResumable as error:
            failed.update(dict.fromkeys(search.choices, error))
            reorder = None
        except Exception:
            logger.exception("beam search failed")
            failed.update(dict.fromkeys(search.choices, ModelFailed("beam search failed", remedy=SEE_LOG)))
            reorder = None
        else:
            if reorder is None:
                failed.update(dict.fromkeys(search.choices, _not_finite(search.choices[0])))
        for source, target in reorder.copies if reorder else ():
            self._kv.fork(source, target)
        for beam in reorder.ended if reorder else beams:
            self._kv.free(beam)
        if reorder is not None:
            self._outputs.generated |= dict.fromkeys(search.choices)


def _score(request: Request, logits: LogitsArray, rows: range) -> None:
    """Have a request read the rows after its last computed tokens, one after the other."""
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
