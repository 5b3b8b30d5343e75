"""Grammar compiler: structured outputs compiled by llguidance for the vocabulary of one model."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import InvalidRequest
from genserve.sampling.structured_outputs import StructuredOutputs
from genserve.text.grammar_trial import LIMITS, MAX_MESSAGE_CHARS, compile_refusal
from genserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

__all__ = ["Grammar", "GrammarCompiler"]


MAX_COMPILED = 16
# Small models like to go on with spaces for ever where these are allowed without end. And what llguidance
# does not know of a schema is refused, whatever the schema says of it.
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[ \t\n\r]{1,32}",
    "lenient": False,
    "coerce_one_of": False,
}


class Grammar:
    """Where one answer stands in its form; `generation.StructuredOutputGrammar`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether the form is there, and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        """Why it lets no token follow any more, though it is not complete."""
        return _failure(self._matcher)

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `StructuredOutputGrammar`; of [W] words, which are contiguous.

        One call for each answer: llguidance's executor of many threads waits for the interpreter's lock each
        time, which took 10 ms where another thread was busy, and this 2 us.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask[:] = 0

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._matcher.consume_token(token_id)


class GrammarCompiler:
    """The forms of one model's answers, of which the latest stay compiled. Safe from any thread.

    llguidance is imported, and given the vocabulary, when the first request asks for a form.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()           # of what is compiled
        self._compiling = threading.Lock()      # one at a time: it is work beside that of the engine

    def begin(self, outputs: StructuredOutputs) -> Grammar:
        """Return the grammar of one more answer. Compiles it, if need be: keep that off an event loop.

        Raises:
            InvalidRequest: it does not compile, in the time and memory that it may take; says why.
        """
        matcher = self._copied(outputs)
        if matcher is None:
            with self._compiling:
                matcher = self._copied(outputs) or self._compile(outputs)
        return Grammar(matcher)

    def _copied(self, outputs: StructuredOutputs) -> LLMatcher | None:
        """Return a copy of what is compiled already, if that is still good.

        Copies share what their lexer has found out, and once this is too much all of them fail.
        """
        with self._lock:
            compiled = self._compiled.get(outputs)
            if compiled is None:
                return None
            self._compiled.move_to_end(outputs)
            matcher = compiled.deep_copy()
        if not _dead_end(matcher):
            return matcher
        with self._lock:
            self._compiled.pop(outputs, None)
        return None

    def _compile(self, outputs: StructuredOutputs) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = _source(outputs)
        except (ValueError, RecursionError) as error:   # what is nested too deeply, too
            raise _unusable(f"as it is: {error}") from None
        reason = compile_refusal(grammar) if outputs.form in ("json", "grammar", "structural_tag") else ""
        if not reason:
            limits = LLParserLimits(**LIMITS)
            matcher = LLMatcher(self._vocabulary, grammar, limits=limits, log_level=0)
            reason = _dead_end(matcher.deep_copy())
        if reason:
            raise _unusable(f"as it is: {reason}")
        with self._lock:
            self._compiled[outputs] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        ending = sorted(token_id for token_id in self._tokenizer.eos_token_ids if token_id < self._vocab_size)
        if not ending:
            raise InvalidRequest(
                "structured_outputs needs a model with an end-of-sequence token", field="structured_outputs"
            )
        try:
            # Where a form leaves one text alone, llguidance tokenizes it: the name of a special token in it
            # must not become that token, which its masks would then allow and its parser refuse.
            tokenizer = self._tokenizer.as_plain_json()
            return LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=ending)
        except ValueError as error:
            raise _unusable(f"with this model, whose tokenizer llguidance does not take: {error}") from None


def _dead_end(matcher: LLMatcher) -> str:
    """Return why not even a first token can follow; empty if one can."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_error():
        return "it has no text but the empty one"
    return _failure(matcher)


def _failure(matcher: LLMatcher) -> str:
    message = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "no text has this form" if message == "NoExtensionBias" else message[:MAX_MESSAGE_CHARS]


def _unusable(reason: str) -> InvalidRequest:
    name = "structured_outputs"
    return InvalidRequest(f"{name} cannot be used {reason}", field=name)


def _source(outputs: StructuredOutputs) -> str:
    """Return the form in llguidance's words; raises ValueError and RecursionError where it cannot be said."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    match outputs.form:
        case "json":
            return LLMatcher.grammar_from_json_schema(outputs.text, overrides=JSON_OPTIONS)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
        case "regex":
            # \d is the ten digits, and not those of all scripts.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(outputs.text, 'd')}/")
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(outputs.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "structural_tag":
            return _tags(**json.loads(outputs.text))
        case "grammar" if "::=" in outputs.text:
            return grammar_from("gbnf", outputs.text)
        case _:
            return LLMatcher.grammar_from_lark(outputs.text)


def _tags(*, structures: Sequence[Mapping[str, Any]], triggers: Sequence[str]) -> str:
    """Return the grammar of any text in which a trigger is the beginning of one of the structures."""
    from llguidance import StructTag

    tags = [
        StructTag(
            trigger=next(trigger for trigger in triggers if structure["begin"].startswith(trigger)),
            begin=structure["begin"],
            grammar=structure["schema"] | {"x-guidance": JSON_OPTIONS},
            end=structure["end"],
        )
        for structure in structures
    ]
    return StructTag.to_grammar(tags, assume_special=False)
