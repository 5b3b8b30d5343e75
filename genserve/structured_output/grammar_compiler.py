"""Grammar compiler: compiles structured outputs and tool calls with llguidance, for one vocabulary."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genserve.errors import InvalidRequest
from genserve.sampling.structured_outputs import JsonOptions, StructuredOutputs
from genserve.structured_output.argument_grammar import arguments_field
from genserve.structured_output.closing_grammar import JsonTokens
from genserve.structured_output.gbnf import gbnf_to_lark, is_gbnf
from genserve.structured_output.grammar_trial import compile_rejection
from genserve.structured_output.json_escapes import Escapes, EscapeTokens
from genserve.structured_output.json_schema import guided_schema, with_all_escapes
from genserve.structured_output.tool_grammar import ToolGrammar
from genserve.structured_output.trial_compiler import LIMITS, MAX_MESSAGE_CHARS
from genserve.structured_output.unique_keys import TokenBytes, UniqueKeys
from genserve.text.argument_syntax import JSON
from genserve.text.tokenizer import Tokenizer
from genserve.text.vocabulary import TokenNames

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_COMPILED = 16
# The kinds of structured outputs whose text is not JSON and has no JSON within tags.
_NO_JSON = ("regex", "choice", "grammar")
# How many possible first tokens of an answer are tried.
_FIRST_TOKENS = 8


class GuidanceGrammar:
    """The state of one answer in its grammar; implements `StructuredOutputGrammar`."""

    cut = False

    def __init__(
        self, matcher: LLMatcher, *, keys: UniqueKeys | None = None, escapes: Escapes | None = None
    ) -> None:
        """Begin an answer.

        Args:
            matcher: a matcher that has read nothing yet.
            keys: forbids repeated keys, in an answer that is JSON.
            escapes: allows all escapes of strings, in an answer that is or may contain JSON.
        """
        self._matcher = matcher
        self._keys = keys
        self._escapes = escapes

    def fork(self) -> GuidanceGrammar:
        """See `ForkableGrammar`. The copy allows repeated keys: a way to the end has no optional key."""
        escapes = None if self._escapes is None else self._escapes.copy()
        return GuidanceGrammar(self._matcher.deep_copy(), escapes=escapes)

    @property
    def complete(self) -> bool:
        """See `StructuredOutputGrammar`."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        """See `StructuredOutputGrammar`."""
        return "" if self._escapes is not None and self._escapes.begun else _failure(self._matcher)

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `StructuredOutputGrammar`; `mask` is contiguous, [W] int32.

        One call per answer takes 2 us. llguidance's parallel executor would wait for the GIL at each call,
        which took 10 ms while another thread was busy.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask[:] = 0
        if self._escapes is not None:
            self._escapes.allow(mask, self._matcher)
        if self._keys is not None:
            self._keys.forbid(mask)

    def accept(self, token_id: int) -> bool:
        """See `StructuredOutputGrammar`."""
        if self._escapes is None or not self._escapes.concern(token_id):
            accepted = self._matcher.consume_token(token_id)
        else:
            before = self._matcher.deep_copy()
            accepted = self._matcher.consume_token(token_id)
            after = self._escapes.accept(token_id, before=before, matcher=self._matcher, accepted=accepted)
            self._matcher, accepted = after or self._matcher, after is not None
        if accepted and self._keys is not None:
            self._keys.accept(token_id)
        return accepted


class GrammarCompiler:
    """Compiles structured outputs for one model, and caches the latest grammars. Safe from any thread.

    llguidance is imported, and gets the vocabulary, at the first request with structured outputs. What may
    take too much time or memory to compile is first tried in a process of its own (`grammar_trial.py`),
    unless it is known that it was (`is_tried`).
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutputs | str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards the cache
        self._compiling = threading.Lock()  # compiles one at a time, to leave CPU time to the engine

    def compile(self, outputs: StructuredOutputs, *, is_tried: bool = False) -> GuidanceGrammar:
        """Return a grammar for one answer, compiled or copied from the cache; not for an event loop.

        Raises:
            InvalidRequest: the grammar does not compile within the limits of time and memory.
        """
        needs_trial = not is_tried and outputs.kind in ("json", "grammar", "structural_tag")
        try:
            matcher = self._grammar(outputs, partial(_source, outputs), needs_trial=needs_trial)
        except _CompileError as error:
            raise _unusable(str(error)) from None
        is_json = outputs.kind in ("json", "json_object")
        return GuidanceGrammar(
            matcher,
            keys=UniqueKeys(self._token_bytes) if is_json else None,
            escapes=self._escapes(outputs),
        )

    def compile_tools(
        self, tools: ToolGrammar, *, text: StructuredOutputs | None, is_tried: bool = False
    ) -> GuidanceGrammar:
        """Return a grammar for one answer that may call tools; see `compile`.

        Args:
            tools: the tools, and whether the answer must call one.
            text: the structure of an answer without calls; None: any text.
            is_tried: see `GrammarCompiler`.

        Raises:
            InvalidRequest: the grammar does not compile within the limits, or a text's form is not supported;
                `field` names the tool.
        """
        alone = None if text is None else self._text_grammar(text, is_tried=is_tried)
        source = tools.source(self._names.split, text=alone)
        try:
            matcher = self._grammar(source, lambda: source, needs_trial=not is_tried)
        except _CompileError as error:
            raise self._blamed(tools, error) from None
        # Quotes in free text and in other syntaxes do not enclose keys.
        is_json = tools.must_call and tools.tool_format.arguments == JSON
        keys = UniqueKeys(self._token_bytes) if is_json else None
        # A text in other syntaxes is written as it is, and its grammar says which escapes it has.
        is_plain_text = any(tool.input_format for tool in tools.tools.values())
        has_escapes = tools.tool_format.arguments == JSON or not is_plain_text
        return GuidanceGrammar(matcher, keys=keys, escapes=self._escapes(text) if has_escapes else None)

    def _escapes(self, text: StructuredOutputs | None) -> Escapes | None:
        """Return the escapes of an answer; None: in such a text a backslash need not begin an escape."""
        if self._escape_tokens is None or (text is not None and text.kind in _NO_JSON):
            return None
        return Escapes(self._escape_tokens)

    def _text_grammar(self, outputs: StructuredOutputs, *, is_tried: bool) -> dict[str, Any]:
        """Return the grammar of structured outputs as a part of another grammar, after compiling it alone."""
        self.compile(outputs, is_tried=is_tried)
        source = _source(outputs)
        return dict(json.loads(source)["grammars"][0]) if source[:1] == "{" else {"lark_grammar": source}

    def _blamed(self, tools: ToolGrammar, error: _CompileError) -> InvalidRequest:
        """Return the error of the first tool without which the tools before it compile."""
        indices = list(tools.tools)
        reasons = {len(indices): str(error)}
        low, high = 0, len(indices)
        while high - low > 1:
            middle = (low + high) // 2
            some = replace(tools, tools={index: tools.tools[index] for index in indices[:middle]})
            reasons[middle] = compile_rejection(some.source(self._names.split, text=None))
            low, high = (low, middle) if reasons[middle] else (middle, high)
        place = "tools"
        if indices:
            index = indices[high - 1]
            place = arguments_field(index, tools.tools[index].input_format)
        return InvalidRequest(f"{place} cannot be used: {reasons[high]}", field=place)

    def _grammar(
        self, key: StructuredOutputs | str, source: Callable[[], str], *, needs_trial: bool
    ) -> LLMatcher:
        """Return a copy of a compiled grammar; raises _CompileError."""
        matcher = self._copied(key)
        if matcher is None:
            with self._compiling:
                matcher = self._copied(key) or self._compile(key, source, needs_trial=needs_trial)
        return matcher

    def _copied(self, key: StructuredOutputs | str) -> LLMatcher | None:
        """Return a working copy of the cached matcher, if any.

        Copies share the states of their lexer, and all copies fail once the states exceed a limit.
        """
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                return None
            self._compiled.move_to_end(key)
            matcher = compiled.deep_copy()
        if not _dead_end(matcher):
            return matcher
        with self._lock:
            self._compiled.pop(key, None)
        return None

    def _compile(
        self, key: StructuredOutputs | str, source: Callable[[], str], *, needs_trial: bool
    ) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = source()
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise _CompileError(str(error)) from None
        reason = compile_rejection(grammar) if needs_trial else ""
        if not reason:
            limits = LLParserLimits(**LIMITS)
            matcher = LLMatcher(self._vocabulary, grammar, limits=limits, log_level=0)
            reason = _dead_end(matcher.deep_copy()) or _failed_first_token(matcher.deep_copy())
        if reason:
            raise _CompileError(reason)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    @cached_property
    def _names(self) -> TokenNames:
        """The names that grammars cannot write as text.

        llguidance treats any added token whose name is in angle brackets as special, even if it is text to
        the tokenizer, such as Qwen's <tool_call>.
        """
        return self._tokenizer.added_names(self._vocabulary.is_special_token)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        vocabulary = self._vocabulary
        return TokenBytes([vocabulary.decode_bytes([token_id]) for token_id in range(self._vocab_size)])

    @cached_property
    def _escape_tokens(self) -> EscapeTokens | None:
        return EscapeTokens.of(self._vocabulary, self._token_bytes.by_id)

    @cached_property
    def json_tokens(self) -> JsonTokens | None:
        """The tokens that end parts of JSON; None: the vocabulary lacks one."""
        return JsonTokens.of(self._tokenizer, vocab_size=self._vocab_size)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        ending = sorted(token_id for token_id in self._tokenizer.eos_token_ids if token_id < self._vocab_size)
        if not ending:
            raise InvalidRequest(
                "structured_outputs and tools need a model with an end-of-sequence token",
                field="structured_outputs",
            )
        try:
            # If only one text may follow, llguidance tokenizes the text. A name of a special token in it must
            # stay text: the masks would allow the special token, but the parser would reject it.
            tokenizer = self._tokenizer.as_plain_json()
            return LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=ending)
        except ValueError as error:
            raise _unusable(f"llguidance rejects the tokenizer of this model: {error}") from None


class _CompileError(Exception):
    """A grammar does not compile; the message says why."""


def _dead_end(matcher: LLMatcher) -> str:
    """Return why not even a first token can follow; empty if one can."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_error():
        return "it allows only the empty text"
    return _failure(matcher)


def _failed_first_token(matcher: LLMatcher) -> str:
    """Return why an allowed first token cannot be read, when an answer has too many ways to begin."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    for token_id in allowed[:: max(1, len(allowed) // _FIRST_TOKENS)]:
        begun = matcher.deep_copy()
        begun.consume_token(int(token_id))
        if begun.is_error():
            return _failure(begun)
    return ""


def _failure(matcher: LLMatcher) -> str:
    message = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return "no text matches it" if message == "NoExtensionBias" else message[:MAX_MESSAGE_CHARS]


def _unusable(reason: str) -> InvalidRequest:
    name = "structured_outputs"
    return InvalidRequest(f"{name} cannot be used: {reason}", field=name)


def _source(outputs: StructuredOutputs) -> str:
    """Return the source of llguidance's grammar; raises ValueError and RecursionError for invalid outputs."""
    from llguidance import LLMatcher, regex_to_lark

    match outputs.kind:
        case "json":
            schema = guided_schema(json.loads(outputs.text), outputs.json_options)
            return LLMatcher.grammar_from_json_schema(schema)
        case "json_object":
            return LLMatcher.grammar_from_json_schema(guided_schema({"type": "object"}, outputs.json_options))
        case "regex":
            # \d matches only ASCII digits.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(outputs.text, 'd')}/")
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(outputs.text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "structural_tag":
            return _tags(**json.loads(outputs.text), options=outputs.json_options)
        case "grammar" if is_gbnf(outputs.text):
            return gbnf_to_lark(outputs.text)
        case _:
            return LLMatcher.grammar_from_lark(with_all_escapes(outputs.text))


def _tags(*, structures: Sequence[Mapping[str, Any]], triggers: Sequence[str], options: JsonOptions) -> str:
    """Return the grammar of a free text in which each trigger begins one of the structures."""
    from llguidance import StructTag

    tags = [
        StructTag(
            trigger=next(trigger for trigger in triggers if structure["begin"].startswith(trigger)),
            begin=structure["begin"],
            grammar=guided_schema(structure["schema"], options),
            end=structure["end"],
        )
        for structure in structures
    ]
    return StructTag.to_grammar(tags, assume_special=False)
