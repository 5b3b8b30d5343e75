"""Decisions: typed questions about a state, answered by the probabilities of their options.

A question is a turn of the user that ends with its options, each behind a label: a letter or two, `yes` or
`no`, or a digit. What the model gives to the label as the beginning of its answer is the probability of the
option. A label of several tokens has the product of their probabilities: no label begins with another one,
so these are different answers, and their lengths need no correction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from string import ascii_uppercase, digits
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from genserve.completion import TopTokens, join_deltas
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.generation_request import GenerationRequest
from genserve.errors import ContextLengthExceeded, InvalidRequest, ModelFailed, require
from genserve.prompt import Chat, Message, Reasoning
from genserve.sampling.sampling_params import SamplingParams
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.text_model import TextModel

QuestionType = Literal["choice", "noul", "score"]
QUESTION_TYPES: tuple[QuestionType, ...] = get_args(QuestionType)
MAX_OPTIONS = 255       # of a choice, as in TypeSafe's protocol
MIN_LEVELS, MAX_LEVELS = 2, len(digits)     # of a score

_LETTERS = tuple(ascii_uppercase)
_PAIRS = tuple(map("".join, product(_LETTERS, repeat=2)))
_REPLIES: Mapping[QuestionType, str] = {
    "choice": "Answer with the letter of one option only.",
    "noul": "Answer with yes or no only.",
    "score": "Answer with the number of one level only.",
}
# The tokens of a prompt's end that may change how the text behind it is split.
_TAIL_TOKENS = 16

TokenIds: TypeAlias = tuple[int, ...]
Probabilities: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One answer to a question."""

    name: str
    labels: tuple[str, ...]     # the spellings with which the model may name it; the prompt shows the first
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its options. Those of a `noul` are `true` and `false`, those of a score its levels."""

    type: QuestionType
    instructions: str
    options: tuple[Option, ...]

    def text(self) -> str:
        """Return the question as the model reads it, behind the state."""
        lines = [f"Question: {self.instructions}"] if self.instructions else []
        lines += filter(None, map(self._line, self.options))
        return "\n".join([*lines, _REPLIES[self.type]])

    def _line(self, option: Option) -> str:
        label = option.labels[0]
        if self.type == "choice":
            return f"{label}: {option.name}" + (f" - {option.description}" if option.description else "")
        return f"{label}: {option.description}" if option.description else ""


def read_question(question_type: str, *, instructions: Any = None, criteria: Any = None) -> Question:
    """Return a question from its JSON, in the form of TypeSafe's System One, which llama.cpp and vLLM share.

    Args:
        question_type: choice, noul or score.
        instructions: the question, a text or JSON.
        criteria: an object with a description, or null, for each option of a choice; a list of the levels
            of a score; an object that may describe `true` and `false` of a noul, or None.

    Raises:
        InvalidRequest: `field` is `type`, `instructions` or `criteria`.
    """
    match question_type:
        case "choice":
            options = _choices(criteria)
        case "noul":
            options = _yes_and_no(criteria)
        case "score":
            options = _levels(criteria)
        case _:
            raise InvalidRequest(f"type must be one of {', '.join(QUESTION_TYPES)}", field="type")
    is_clear = bool(instructions) or question_type != "noul" or any(option.description for option in options)
    require(is_clear, "instructions", "must be given, or else criteria")
    return Question(type=question_type, instructions=as_text(instructions), options=options)


def _choices(criteria: Any) -> tuple[Option, ...]:
    require(isinstance(criteria, Mapping), "criteria", "must be an object: of a choice it has the options")
    num_options = len(criteria)
    require(
        1 <= num_options <= MAX_OPTIONS, "criteria", f"has {num_options} options; give 1 to {MAX_OPTIONS}"
    )
    labels = _LETTERS if num_options <= len(_LETTERS) else _PAIRS
    return tuple(
        Option(name=name, labels=(label,), description=as_text(description))
        for label, (name, description) in zip(labels, criteria.items(), strict=False)
    )


def _yes_and_no(criteria: Any) -> tuple[Option, ...]:
    given = {} if criteria is None else criteria
    valid = isinstance(given, Mapping) and given.keys() <= {"true", "false"}
    require(valid, "criteria", "must be an object with true and false: of a noul it describes these")
    return (
        Option(name="true", labels=("yes", "Yes"), description=as_text(given.get("true"))),
        Option(name="false", labels=("no", "No"), description=as_text(given.get("false"))),
    )


def _levels(criteria: Any) -> tuple[Option, ...]:
    require(isinstance(criteria, Sequence) and not isinstance(criteria, str), "criteria", "must be a list")
    num_levels = len(criteria)
    rule = f"has {num_levels} levels; give {MIN_LEVELS} to {MAX_LEVELS}"
    require(MIN_LEVELS <= num_levels <= MAX_LEVELS, "criteria", rule)
    return tuple(
        Option(name=digit, labels=(digit,), description=as_text(level))
        for digit, level in zip(digits, criteria, strict=False)
    )


def as_text(content: Any) -> str:
    """Return a state, instructions or a description as a text; JSON is written, None is empty."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The requests by which one question is answered.

    Attributes:
        question: the question.
        labels: for each option, the token ids of each of its labels.
        requests: by the tokens with which the answer has begun; each asks for the next token of the labels
            that begin so. One request, if each label is a token.
    """

    question: Question
    labels: tuple[tuple[TokenIds, ...], ...]
    requests: Mapping[TokenIds, GenerationRequest]

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of state and question, as the model reads them."""
        return self.requests[()].num_prompt_tokens

    def logprobs(self, answers: Mapping[GenerationRequest, TopTokens]) -> Probabilities:
        """Return the log-probability of each option as the beginning of the model's answer, [options].

        Args:
            answers: the log-probabilities of the next tokens, by request.

        Raises:
            InvalidRequest: the decoding loop of the model has not sampled a token from its logits; `field` is
                `model`.
            ModelFailed: the log-probabilities are not numbers.
        """
        found = {begun: dict(answers.get(request, ())) for begun, request in self.requests.items()}
        for begun, request in self.requests.items():
            if not found[begun].keys() >= {*request.params.logprob_token_ids}:
                raise InvalidRequest(
                    f"the decoding loop of model {request.model!r} chooses tokens of its own, which have no "
                    "probabilities",
                    field="model",
                    remedy="name a model whose model.py has no `decode`, or one that calls `sample` first",
                )
        logprobs = np.array(
            [np.logaddexp.reduce([_logprob(ids, found) for ids in labels]) for labels in self.labels]
        )
        if np.isnan(logprobs).any() or not np.isfinite(logprobs).any():
            raise ModelFailed("the model computes no probability for the options")
        return logprobs


def _logprob(token_ids: TokenIds, found: Mapping[TokenIds, Mapping[int, float]]) -> float:
    return sum(found[token_ids[:index]][token_id] for index, token_id in enumerate(token_ids))


def prepare_read(
    model: TextModel,
    state: Any,
    question: Question,
    *,
    instructions: str | None = None,
    params: SamplingParams | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Read:
    """Return the requests that answer a question. Takes time as `TextModel.prepare` does.

    The prompts of questions about one state begin with the state, so that the prefix cache has it after the
    first of them.

    Args:
        model: the model.
        state: what the question is about: a text or JSON.
        question: the question.
        instructions: the system message of the chat.
        params: `priority` and `cache_salt` of the requests.
        template_kwargs: variables of the chat template.

    Raises:
        InvalidRequest: the model has no chat template, begins its answers with reasoning, or cannot answer
            with the labels. `field` is `state`, `instructions` or `model`.
        ContextLengthExceeded: the prompt is too long; `field` is `state`.
        ModelFailed: the chat template or the tokenizer failed.
    """
    system = [Message(role="system", content=instructions)] if instructions else []
    asked = Message(role="user", content=f"{as_text(state)}\n\n{question.text()}")
    chat = Chat(
        messages=(*system, asked),
        template_kwargs=template_kwargs or {},
        reasoning=Reasoning(enabled=False),
    )
    # Whatever the greedy token is, the log-probabilities are those of the model; it only must not be hidden.
    params = replace(params or SamplingParams(), temperature=0.0, max_tokens=1, min_tokens=1, logprobs=True)
    if model.tokenizer.chat_template is None:
        raise InvalidRequest(
            f"model {model.name!r} has no chat template, by which it would read a question",
            field="model",
            remedy="name a model of chats, or add chat_template.jinja to its tokenizer stage",
        )
    try:
        first = model.prepare(chat, params)
        if first.begins_reasoning:
            raise InvalidRequest(
                f"model {model.name!r} begins every answer with reasoning, so that no option can follow",
                field="model",
                remedy="name a model whose reasoning can be turned off",
            )
        prompt_ids = first.prompt_token_ids
        labels = tuple(
            # A tokenizer may read two spellings as one.
            tuple(dict.fromkeys(_label_ids(model.tokenizer, prompt_ids, label) for label in option.labels))
            for option in question.options
        )
        _require_different(labels)
        requests: dict[TokenIds, GenerationRequest] = {}
        for begun, next_ids in _next_tokens(labels):
            request = model.prepare([*prompt_ids, *begun], params) if begun else first
            requests[begun] = replace(request, params=replace(request.params, logprob_token_ids=next_ids))
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(
            error.message,
            remedy="send a shorter state",
            field="state",
            num_tokens=error.num_tokens,
            max_length=error.max_length,
        ) from None
    return Read(question=question, labels=labels, requests=requests)


def decide(
    model: TextModel,
    state: Any,
    question: Question,
    *,
    instructions: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Probabilities:
    """Return the log-probability of each option of a question, [options]; waits for the model.

    Raises:
        GenserveError: see `prepare_read` and `TextEngine.submit`; or the model fails.
    """
    read = prepare_read(
        model, state, question, instructions=instructions, template_kwargs=template_kwargs
    )
    answers: dict[GenerationRequest, TopTokens] = {}
    for request in read.requests.values():
        with DeltaStream(model.engine, request) as stream:
            tops = join_deltas(stream).top_logprobs
        if tops:
            answers[request] = tops[0]
    return read.logprobs(answers)


def _label_ids(tokenizer: Tokenizer, prompt_ids: TokenIds, label: str) -> TokenIds:
    """Return the tokens that a label adds to a prompt; raises InvalidRequest."""
    tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    before = tokenizer.encode(tail, add_special_tokens=False)
    behind = tokenizer.encode(tail + label, add_special_tokens=False)
    if behind[: len(before)] != before:
        raise InvalidRequest(
            f"the tokenizer joins the label {label!r} with the end of the prompt, so the model cannot answer "
            "with it",
            field="model",
            remedy="name a model whose chat template ends with a token of its own or a line feed",
        )
    return tuple(behind[len(before) :])


def _require_different(labels: Sequence[Sequence[TokenIds]]) -> None:
    """Raise InvalidRequest if the tokens of a label are those of another one, or begin them."""
    found = [ids for spellings in labels for ids in spellings]
    beginnings = {ids[:length] for ids in found for length in range(len(ids))}
    if len(set(found)) < len(found) or beginnings & set(found):
        raise InvalidRequest(
            "the tokenizer reads two options' labels as the same tokens, so the model cannot tell them apart",
            field="model",
            remedy="name a model whose tokenizer knows the letters A to Z, the digits, yes and no",
        )


def _next_tokens(labels: Sequence[Sequence[TokenIds]]) -> Iterator[tuple[TokenIds, TokenIds]]:
    """Yield the beginnings of labels, the empty one first, each with the tokens that may follow it."""
    following: dict[TokenIds, set[int]] = {(): set()}
    for token_ids in (ids for spellings in labels for ids in spellings):
        for index, token_id in enumerate(token_ids):
            following.setdefault(token_ids[:index], set()).add(token_id)
    for begun, token_ids_behind in following.items():
        yield begun, tuple(sorted(token_ids_behind))


def probabilities(logprobs: Probabilities, *, temperature: float) -> Probabilities:
    """Return the probabilities of the options alone, [options]: softmax(logprobs / temperature)."""
    weights = np.exp((logprobs - logprobs.max()) / temperature)
    found: Probabilities = weights / weights.sum()
    return found


def confidence_of_choice(probabilities: Probabilities) -> float:
    """Return how far the likeliest option is above chance, from 0 to 1; TypeSafe's formula."""
    if len(probabilities) < 2:
        return 1.0
    chance = 1 / len(probabilities)
    return max(0.0, float((probabilities.max() - chance) / (1 - chance)))


def confidence_of_score(probabilities: Probabilities) -> float:
    """Return how near to the likeliest level the levels are, from 0 to 1; TypeSafe's formula.

    That is 1 minus the mean distance to the likeliest level, in units of the mean distance to the middle of
    levels that are equally likely.
    """
    levels = np.arange(len(probabilities))
    distance = float(probabilities @ np.abs(levels - probabilities.argmax()))
    return max(0.0, 1 - distance / float(np.abs(levels - levels.mean()).mean()))
