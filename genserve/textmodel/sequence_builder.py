"""Sequence builder: turns a generation request into the token sequences of the engine.

A deployment's ingress has one too, which builds nothing: it checks requests, and reads their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from genserve.engine.beam_search import BeamSearch
from genserve.engine.delta_builder import AnswerText
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.resumption import RepeatedSequence, ResumedSequence, resumed_kind
from genserve.engine.sequence_plugins import PluginContext
from genserve.engine.thinking_budget import ThinkingBudget
from genserve.engine.token_sequence import TokenSequence
from genserve.prompt import Chat, Prompt
from genserve.sampling.grammar_bitmask import ForkableGrammar, StructuredOutputGrammar
from genserve.sampling.sampling_params import SamplingParams
from genserve.structured_output.closing_grammar import CallEnds, ClosingGrammar
from genserve.structured_output.grammar_compiler import GrammarCompiler
from genserve.structured_output.harmony_grammar import HarmonyAnswer
from genserve.text.detokenizer import Detokenizer
from genserve.text.harmony import HarmonyParser, HarmonyTokens
from genserve.text.message_parser import MessageParser
from genserve.text.stop_conditions import StopChecker, StopFinder, StopRegex, StopStrings
from genserve.text.tokenizer import Tokenizer
from genserve.text.tool_formats import HARMONY
from genserve.textmodel.decoder_stage import Decoding
from genserve.textmodel.logits_runtime import LogitsFigures
from genserve.textmodel.reasoning_tokens import ReasoningTokens
from genserve.textmodel.receipts import ModelReceipts
from genserve.textmodel.request_rules import ContextLimits, ParamTokens, beam_width
from genserve.textmodel.tool_calling import ToolCalling


class SequenceBuilder:
    """Builds the sequences of requests to one text model, and their answers' parsers. Safe from any thread.

    Attributes:
        limits: the limits of the model's context.
        param_tokens: the token ids in sampling parameters.
        reasoning: the tags around the reasoning of answers.
        tools: how the model reads and calls tools.
        receipts: begins the receipts of answers; None: the model runs in other processes.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        decoding: Decoding,
        logits: LogitsFigures,
        receipts: ModelReceipts | None = None,
    ) -> None:
        """Build the sequences of the model `name`; without `receipts`, requests are only checked."""
        self.limits = ContextLimits(name, logits)
        self.tools = ToolCalling(tokenizer, tool_format=decoding.tool_format)
        self._harmony = HarmonyTokens.of(tokenizer) if self.tools.tool_format is HARMONY else None
        self.reasoning = ReasoningTokens(
            tokenizer, harmony=self._harmony, reasoning_format=decoding.reasoning_format
        )
        self._call_ends = CallEnds.of(tokenizer, self.tools.tool_format)
        self._tokenizer = tokenizer
        self._plugins = decoding.plugins
        self._is_default_loop = decoding.is_default_loop
        self._vocab_size = logits.vocab_size
        self._logits = logits
        self.receipts = receipts
        self._grammars = GrammarCompiler(tokenizer, vocab_size=logits.vocab_size)
        self.param_tokens = ParamTokens(tokenizer, vocab_size=logits.vocab_size)

    def check(self, request: GenerationRequest) -> None:
        """Reject a request that `sequences` of another process would reject.

        A grammar, a stop expression and the plug-ins are made for the first choice, and dropped.

        Raises:
            InvalidRequest, ModelFailed: see `sequences`.
        """
        for pattern in request.params.stop_regex:
            StopRegex(pattern)
        grammar = self._grammar(request)
        context = self._context(request, seed=request.seeds[0])
        self._plugins.check(context)
        self.reasoning.budget(context, begun=request.begins_reasoning)
        grammar()

    def sequences(self, request: GenerationRequest) -> list[TokenSequence]:
        """Return one token sequence for each choice.

        Raises:
            InvalidRequest: a grammar or a stop expression does not compile, a plug-in does not exist, or it
                rejects its arguments.
            ContextLengthExceeded: the model has less room than in the process that made the request.
            ModelFailed: a plug-in failed.
            NotResumable: an answer cannot begin with the tokens that the client has received of it.
        """
        params, token_ids = request.params, request.prompt_token_ids
        max_length = self.limits.check(
            request.num_prompt_tokens,
            params,
            num_choices=request.num_choices,
            field=prompt_field(request.prompt),
        )
        text = self._stop_checker(request)
        kind = TokenSequence
        if request.is_resumed:
            kind = resumed_kind(params, is_default_loop=self._is_default_loop)
        begin = partial(
            kind,
            token_ids,
            params=params,
            eos_token_ids=self._tokenizer.eos_token_ids,
            max_length=max_length,
            vocab_size=self._vocab_size,
            tokenized=self.param_tokens.tokenized(params),
            deadline_s=request.deadline_s,
        )
        grammar = self._grammar(request)
        sequences: list[TokenSequence] = []
        for choice, seed in enumerate(request.seeds):
            context = self._context(request, seed=seed)
            sequence = begin(
                seed=seed,
                text=self._plugins.parsed(text.fork(), context),
                plugins=self._plugins.for_sequence(
                    context, ours=self.reasoning.budget(context, begun=request.begins_reasoning)
                ),
                grammar=grammar(),
            )
            sequence.request, sequence.choice, sequence.share = request, choice, request.share
            if params.return_receipt and self.receipts is not None:
                sequence.receipt = self.receipts.begin(
                    request, choice=choice, max_tokens=sequence.max_new_tokens, logits=self._logits
                )
            sequences.append(sequence)
        width = beam_width(params, num_choices=request.num_choices)
        if width > 1:
            BeamSearch(sequences, width=width, text=text)
        for sequence, received in zip(sequences, request.resumed_token_ids, strict=False):
            if isinstance(sequence, ResumedSequence) and received:
                sequence.resume(received)
        # An answer that is generated again must repeat its first part, whose reasoning was not ended yet.
        if request.ends_reasoning and kind is not RepeatedSequence:
            for sequence in sequences:
                self.end_reasoning(sequence)
        return sequences

    def end_reasoning(self, sequence: TokenSequence) -> None:
        """End the reasoning of a sequence at its next token, or as soon as it begins; on the engine's thread.

        The text of a beam search and of a structured output stays as it is.
        """
        request = sequence.request
        if sequence.search is not None or not self.reasoning.can_end(request.params):
            return
        budget = sequence.plugins.processor(ThinkingBudget)
        if budget is None:
            context = self._context(request, seed=request.seeds[sequence.choice])
            name, budget = self.reasoning.ending(context, begun=request.begins_reasoning)
            sequence.add_processor(name, budget)
        budget.end()
        if sequence.receipt is not None:
            sequence.receipt.is_repeatable = False

    def text(self, request: GenerationRequest, *, choice: int) -> AnswerText:
        """Return the text of an answer before its first token. Raises the errors of an output parser."""
        context = self._context(request, seed=request.seeds[choice])
        return self._plugins.parsed(self._stop_checker(request), context)

    def detokenizer(
        self, prompt: Prompt, params: SamplingParams, *, token_ids: Sequence[int]
    ) -> Detokenizer:
        """Return a new detokenizer for one answer.

        The answer to a text, to token ids and to a continued message goes on behind the prompt, so that it
        keeps the space that begins it. A message of its own begins a text, as in transformers, whatever the
        template has written before it.

        Args:
            prompt: the prompt; tokens that mark calls or reasoning in answers to a chat are part of the text.
            params: the sampling parameters; they decide whether special tokens are part of the text.
            token_ids: the tokens of the prompt.
        """
        begins_text = isinstance(prompt, Chat) and not prompt.continue_final_message
        return self._tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens,
            shown=self._shown_ids(prompt, params),
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            behind=() if begins_text else token_ids,
        )

    def message_parser(self, prompt: Prompt, params: SamplingParams, *, begun: bool) -> MessageParser | None:
        """Return a parser of one answer to a request; None: all of the text is content.

        Args:
            prompt: the prompt; a chat may have tools.
            params: the sampling parameters; they decide whether the answer has a required structure.
            begun: whether the prompt begins the reasoning, see `GenerationRequest.begins_reasoning`.
        """
        if self._harmony is not None and _has_messages(prompt, params):
            assert isinstance(prompt, Chat)
            return HarmonyParser(self._harmony, tools={tool.name for tool in prompt.callable_tools})
        new_calls = self.tools.new_parser(prompt)
        reasoning = self.reasoning.parser(prompt, params, begun=begun, new_calls=new_calls)
        tools = None if new_calls is None else new_calls()
        if reasoning is None and tools is None:
            return None
        return MessageParser(reasoning=reasoning, tools=tools)

    def _shown_ids(self, prompt: Prompt, params: SamplingParams) -> Collection[int]:
        """Return the special tokens that the parser of an answer must see."""
        if self._harmony is not None and _has_messages(prompt, params):
            return self._harmony.ids
        return {*self.tools.shown_ids(prompt), *self.reasoning.shown_ids(prompt, params)}

    def _stop_checker(self, request: GenerationRequest) -> StopChecker:
        """Return the text of an answer before its first token; its forks share what is slow to build."""
        params = request.params
        finders: list[StopFinder] = [StopStrings(params.stop)] if params.stop else []
        finders += map(StopRegex, params.stop_regex)
        hidden = {}
        if params.stop and params.skip_special_tokens:
            shown = self._shown_ids(request.prompt, params)
            hidden = self._tokenizer.special_tokens_in(params.stop, shown=shown)
        return StopChecker(
            self.detokenizer(request.prompt, params, token_ids=request.prompt_token_ids),
            finders,
            hidden=hidden,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _grammar(self, request: GenerationRequest) -> Callable[[], StructuredOutputGrammar | None]:
        """Return a function that returns the grammar of one answer; None: any text will do."""
        is_tried = request.is_checked
        prompt, params, begun = request.prompt, request.params, request.begins_reasoning
        outputs = params.structured_outputs
        may_reason = self.reasoning.parser(prompt, params, begun=begun) is not None
        tools = self.tools.grammar(prompt, params, may_reason=may_reason)
        if tools is None:
            return lambda: self._grammars.compile(outputs, is_tried=is_tried) if outputs else None
        json_tokens = self._grammars.json_tokens
        max_length = self.limits.max_length(params, num_choices=request.num_choices)
        room = min(params.max_tokens or max_length, max_length - request.num_prompt_tokens)

        def compiled() -> StructuredOutputGrammar:
            grammar: ForkableGrammar = self._grammars.compile_tools(tools, text=outputs, is_tried=is_tried)
            if may_reason:
                grammar = self.reasoning.before(grammar, begun=begun)
            if self._harmony is not None:
                grammar = HarmonyAnswer(grammar, self._harmony, vocab_size=self._vocab_size)
            if json_tokens is None:
                return grammar
            return ClosingGrammar(grammar, json_tokens, room=room, ends=self._call_ends)

        return compiled

    def _context(self, request: GenerationRequest, *, seed: int) -> PluginContext:
        return PluginContext(
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            seed=seed,
        )


def _has_messages(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a parser of ours reads the messages in an answer of a model that writes Harmony."""
    return isinstance(prompt, Chat) and params.output_parser is None


def prompt_field(prompt: Prompt) -> str:
    """Return the name of the field that a prompt comes from."""
    return "messages" if isinstance(prompt, Chat) else "prompt"
