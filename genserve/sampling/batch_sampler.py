"""Batch sampler: the next token of every sequence of a step, in one pass over their rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from genserve.completion import TokenLogprob
from genserve.sampling.grammar_bitmask import StructuredOutputGrammar, grammar_bitmask
from genserve.sampling.logits_array import LogitsArray
from genserve.sampling.logits_processors import (
    NO_EDITS,
    BuiltinLogitsProcessors,
    LogitsEdits,
    RowEdit,
    TokenizedParams,
    join_edits,
)
from genserve.sampling.sampler import (
    GREEDY_RULE,
    LogprobsRequest,
    SamplerOutput,
    SamplingMetadata,
    SamplingRule,
    sample_on_host,
    sampling_rule,
)
from genserve.sampling.sampler_chain import COLDEST, SamplerChain, chain_of
from genserve.sampling.sampling_params import SamplingParams


class PluginProcessors(Protocol):
    """The logits-processor plug-ins of one sequence."""

    @property
    def processes(self) -> bool:
        """Whether the sequence has any."""

    def edits(self, hook: str, token_ids: Sequence[int], *, row: int) -> tuple[RowEdit, ...]:
        """Return the edits of row `row`, the logits after these tokens; `hook` is "pre" or "post_penalty"."""


class SamplingState:
    """The rules by which one sequence is sampled, and their state. Belongs to the engine's thread.

    Attributes:
        params: the sampling parameters of the request.
        seed: the request's, or the one that `InputProcessor` drew.
        grammar: the grammar of the answer and its state; None: any text will do.
        processors: the edits that the request makes to its logits; None: none.
        rule: the rule of a draw by `sample_logits`.
        chain: the samplers of a draw that `sample_logits` cannot make; it survives a preemption.
        draws: whether tokens are drawn; else the best one is taken.
        plain: nothing but the draw decides its tokens, and no log-probability is reported.
    """

    __slots__ = (
        "_ending_ids",
        "_tokenized",
        "chain",
        "draws",
        "grammar",
        "num_prompt_tokens",
        "params",
        "plain",
        "plugins",
        "processors",
        "rule",
        "seed",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        num_prompt_tokens: int,
        ending_ids: frozenset[int],
        tokenized: TokenizedParams,
        plugins: PluginProcessors | None = None,
        grammar: StructuredOutputGrammar | None = None,
    ) -> None:
        """Start before the first token; `seed` is below 2^64, and `ending_ids` are in the vocabulary."""
        self.params = params
        self.seed = seed
        self.num_prompt_tokens = num_prompt_tokens
        self.grammar = grammar
        self.plugins = plugins if plugins is not None and plugins.processes else None
        self._ending_ids = ending_ids
        self._tokenized = tokenized
        self.processors = self.fresh_processors()
        self.chain: SamplerChain | None = chain_of(params, spared_ids=tuple(tokenized.spared_ids))
        self.rule: SamplingRule = sampling_rule(params) if self.chain is None else GREEDY_RULE
        self.draws = params.temperature > COLDEST
        adaptive = self.chain is not None and self.chain.adaptive
        self.plain = not (params.logprobs or grammar or self.processors or self.plugins or adaptive)

    def add_plugins(self, plugins: PluginProcessors) -> None:
        """Have plug-ins from the next token on."""
        self.plugins, self.plain = plugins, False

    def fresh_processors(self) -> BuiltinLogitsProcessors | None:
        """Return the processors in their state before the first token."""
        if not self._tokenized.bad_words and not BuiltinLogitsProcessors.used_by(self.params):
            return None
        return BuiltinLogitsProcessors(
            self.params,
            self._tokenized,
            num_prompt_tokens=self.num_prompt_tokens,
            ending_ids=self._ending_ids,
        )

    @property
    def edits_logits(self) -> bool:
        """Whether a rule of the request, or a plug-in, edits the logits."""
        return self.processors is not None or self.plugins is not None

    def edits(self, token_ids: Sequence[int], *, row: int) -> LogitsEdits:
        """Return the edits of row `row`, the logits after these tokens."""
        edits = NO_EDITS if self.processors is None else self.processors.edits(token_ids, row=row)
        if self.plugins is None:
            return edits
        return replace(
            edits,
            before=self.plugins.edits("pre", token_ids, row=row),
            after=self.plugins.edits("post_penalty", token_ids, row=row),
        )

    def adapt(self, surprise_bits: float | None) -> None:
        """Adapt the next draw to the surprise of the token sampled; None: nothing adapts."""
        if surprise_bits is not None and self.chain is not None:
            self.chain = self.chain.after(surprise_bits)


class SampledSequence(Protocol):
    """A sequence that samples its next token."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and answer."""

    @property
    def sampling(self) -> SamplingState:
        """How it is sampled."""


class SampledToken(NamedTuple):
    """The token sampled for one row."""

    token_id: int
    logprob: TokenLogprob | None    # None if the request does not ask for it
    finite: bool                    # False: a NaN, or the rules leave no finite logit; the token is void
    surprise_bits: float | None     # the token's surprise in its draw, if the samplers adapt to it


def sample(logits: LogitsArray, sequences: Sequence[SampledSequence]) -> list[SampledToken]:
    """Sample one token for each sequence by its parameters.

    `logits` are [R, V] float32, of numpy or of torch, for R sequences; their edits modify them.
    """
    metadata = sampling_metadata(sequences, num_tokens=logits.shape[1])
    output = sample_rows(logits, metadata)
    rows = zip(output.token_ids.tolist(), output.finite.tolist(), strict=True)
    if not metadata.logprobs:
        return [SampledToken(token_id, None, finite, None) for token_id, finite in rows]
    reported: dict[int, TokenLogprob] = {}
    surprises: dict[int, float] = {}
    for request, found in zip(metadata.logprobs, output.logprobs, strict=True):
        if request.surprise:
            surprises[request.row] = -(found.logprob or 0.0) / math.log(2)
        else:
            reported[request.row] = found
    return [
        SampledToken(token_id, reported.get(row), finite, surprises.get(row))
        for row, (token_id, finite) in enumerate(rows)
    ]


def sample_rows(logits: LogitsArray, metadata: SamplingMetadata) -> SamplerOutput:
    """Sample one token per row, on the device of the logits.

    `logits` are [R, V] float32, of numpy or of torch; only `metadata.edits` modify them.
    """
    if isinstance(logits, np.ndarray):
        return sample_on_host(logits, metadata)
    from genserve.sampling.torch_sampler import sample_on_device  # torch is loaded: the logits are its tensor

    return sample_on_device(logits, metadata)


def sampling_metadata(sequences: Sequence[SampledSequence], *, num_tokens: int) -> SamplingMetadata:
    """Return the metadata of these sequences' rows of `num_tokens` logits."""
    states = [sequence.sampling for sequence in sequences]
    plain = all(state.plain for state in states)
    edits = None if plain else _edits(sequences, num_tokens=num_tokens)
    forced = edits.bitmask.forced if edits is not None and edits.bitmask is not None else ()
    drawing = [row for row, state in enumerate(states) if state.draws and row not in forced]
    if plain and not drawing:
        return _GREEDY
    drawn = [states[row] for row in drawing]
    return SamplingMetadata.of(
        drawing,
        [state.rule for state in drawn],
        chains=[state.chain for state in drawn],
        seeds=[state.seed for state in drawn],
        steps=[len(sequences[row].token_ids) - states[row].num_prompt_tokens for row in drawing],
        logprobs=() if plain else _logprobs_requests(states, drawing),
        edits=edits,
    )


def _logprobs_requests(states: Sequence[SamplingState], drawing: Sequence[int]) -> list[LogprobsRequest]:
    requests = [
        LogprobsRequest(
            row=row,
            num_top=state.params.top_logprobs,
            token_ids=state.params.logprob_token_ids,
            processed=state.params.logprobs_mode == "processed",
        )
        for row, state in enumerate(states)
        if state.params.logprobs
    ]
    for row in drawing:
        chain = states[row].chain
        if chain is not None and chain.adaptive:
            requests.append(LogprobsRequest(row=row, processed=True, surprise=True))
    return requests


def _edits(sequences: Sequence[SampledSequence], *, num_tokens: int) -> LogitsEdits | None:
    bitmask = grammar_bitmask([s.sampling.grammar for s in sequences], num_tokens=num_tokens)
    edits = [
        s.sampling.edits(s.token_ids, row=row) for row, s in enumerate(sequences) if s.sampling.edits_logits
    ]
    return join_edits(edits, bitmask=bitmask) if edits or bitmask is not None else None


_GREEDY = SamplingMetadata.of((), (), chains=(), seeds=(), steps=())
