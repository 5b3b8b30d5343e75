"""Parameter table: range, neutral value and conflicts of every sampling parameter; their validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from genserve.errors import InvalidRequest

if TYPE_CHECKING:
    from genserve.sampling.sampling_params import SamplingParams

__all__ = [
    "DRAWING",
    "MAX_BEST_OF",
    "MAX_STOP_STRINGS",
    "MAX_TOP_LOGPROBS",
    "STAGES",
    "acting",
    "require",
    "require_coherent_stages",
    "require_sound",
]


# The default order, and the parameters that make each stage act, with the value at which it does not.
STAGES: Mapping[str, Mapping[str, float]] = {
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_h": {"top_h": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typical_p": {"typical_p": 1.0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.0},
    "eta_cutoff": {"eta_cutoff": 0.0},
    "xtc": {"xtc_probability": 0.0},
}
# What makes a draw of a token, by parameter, with the value at which it asks for nothing.
DRAWING: Mapping[str, object] = {
    **{name: neutral for parameters in STAGES.values() for name, neutral in parameters.items()},
    "mirostat_mode": 0,
    "samplers": (),
}


def require_coherent_stages(params: Any) -> None:
    """Refuse an order that leaves out what the request asks for, and what mirostat takes the place of.

    Raises:
        InvalidRequest: `field` is `samplers`, or the parameter that would be ignored.
    """
    if params.samplers:
        _require_known_names(params.samplers)
        greedy = params.temperature == 0
        for name in () if greedy else acting(params, [s for s in STAGES if s not in params.samplers]):
            raise InvalidRequest(
                f"{name} is given, and samplers leaves its stage out", field=name, remedy="name it there"
            )
    if params.mirostat_mode:
        order = ["samplers"] if params.samplers else []
        for name in [*order, *acting(params, [s for s in STAGES if s != "temperature"])]:
            raise InvalidRequest(
                f"{name} cannot go with mirostat_mode, which truncates by itself", field=name
            )


def acting(params: Any, stages: Iterable[str]) -> Iterator[str]:
    """Return the parameters of those stages that ask for something."""
    for stage in stages:
        for name, neutral in STAGES[stage].items():
            if getattr(params, name) != neutral:
                yield name


def _require_known_names(names: Sequence[object]) -> None:
    for index, name in enumerate(names):
        field = f"samplers[{index}]"
        if not isinstance(name, str) or name not in STAGES:
            known = ", ".join(STAGES)
            raise InvalidRequest(f"{field} is no stage", field=field, remedy=f"the stages are {known}")
        if name in names[:index]:
            raise InvalidRequest(f"{field} names {name!r} again", field=field, remedy="name it once")


MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_REGEXES = 4
MAX_STOP_REGEX_CHARS = 512
MAX_CACHE_SALT_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BEST_OF = 128
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_CHARS = 40

# What a number must be, and how that is said. None of these holds for a NaN.
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: 0 <= x <= 100, "must be between 0 and 100"),
    "top_p": (lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "must be between 0 (off) and 1"),
    "typical_p": (lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    "epsilon_cutoff": (lambda x: 0 <= x < 1, "must be at least 0 (off) and below 1"),
    "eta_cutoff": (lambda x: 0 <= x < 1, "must be at least 0 (off) and below 1"),
    "top_n_sigma": (lambda x: 0 <= x <= 100, "must be between 0 (off) and 100"),
    "top_h": (lambda x: 0 <= x <= 1, "must be between 0 (off) and 1"),
    "xtc_probability": (lambda x: 0 <= x <= 1, "must be between 0 (off) and 1"),
    "xtc_threshold": (lambda x: 0 <= x <= 1, "must be between 0 and 1"),
    "dynatemp_range": (lambda x: 0 <= x <= 100, "must be between 0 (off) and 100"),
    "dynatemp_exponent": (lambda x: 0 < x <= 100, "must be above 0 and at most 100"),
    "mirostat_tau": (lambda x: 0 <= x <= 100, "must be between 0 and 100"),
    "mirostat_eta": (lambda x: 0 <= x <= 1, "must be between 0 and 1"),
    "dry_multiplier": (lambda x: 0 <= x <= 100, "must be between 0 (off) and 100"),
    "dry_base": (lambda x: 1 <= x <= 100, "must be between 1 and 100"),
    # Of much smaller ones, float32 has none to divide by.
    "repetition_penalty": (lambda x: 0.01 <= x <= 100, "must be between 0.01 and 100"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "must be between -2 and 2"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "must be between -2 and 2"),
    "length_penalty": (lambda x: -10 <= x <= 10, "must be between -10 and 10"),
    "diversity_penalty": (lambda x: 0 <= x <= 100, "must be between 0 and 100"),
    "max_tokens": (lambda x: x >= 1, "must be at least 1"),
    "top_k": (lambda x: 0 <= x < 2**31, "must be between 0 (off) and 2^31 - 1"),
    "seed": (lambda x: 0 <= x < 2**64, "must be between 0 and 2^64 - 1"),
    "top_logprobs": (lambda x: 0 <= x <= MAX_TOP_LOGPROBS, f"must be between 0 and {MAX_TOP_LOGPROBS}"),
    "prompt_logprobs": (lambda x: 0 <= x <= MAX_TOP_LOGPROBS, f"must be between 0 and {MAX_TOP_LOGPROBS}"),
    "min_tokens": (lambda x: 0 <= x < 2**31, "must be between 0 (off) and 2^31 - 1"),
    "no_repeat_ngram_size": (lambda x: 0 <= x < 2**31, "must be between 0 (off) and 2^31 - 1"),
    "stream_interval": (lambda x: 1 <= x <= 1024, "must be between 1 and 1024"),
    "thinking_token_budget": (lambda x: 0 <= x < 2**31, "must be between 0 and 2^31 - 1"),
    "truncate_prompt_tokens": (
        lambda x: x == -1 or 1 <= x < 2**31,
        "must be -1 (what the context leaves), or between 1 and 2^31 - 1",
    ),
    "priority": (lambda x: -(2**31) <= x < 2**31, "must be between -2^31 and 2^31 - 1"),
    "max_time_ms": (lambda x: 1 <= x < 2**31, "must be between 1 and 2^31 - 1"),
    "beam_width": (lambda x: x >= 1, "must be at least 1"),
    "num_beam_groups": (lambda x: x >= 1, "must be at least 1"),
    "best_of": (lambda x: 1 <= x <= MAX_BEST_OF, f"must be between 1 and {MAX_BEST_OF}"),
    "penalty_window": (lambda x: 0 <= x < 2**31, "must be between 0 (all) and 2^31 - 1"),
    "dry_allowed_length": (lambda x: 1 <= x <= 128, "must be between 1 and 128"),
    "dry_penalty_last_n": (lambda x: -1 <= x < 2**31, "must be between -1 (all) and 2^31 - 1"),
    "mirostat_mode": (lambda x: 0 <= x <= 2, "must be 0 (off), 1 or 2"),
}
# How many texts each takes, of how many characters.
_TEXTS: Mapping[str, tuple[int, int]] = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS),
    "stop_regex": (MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS),
    "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    "dry_sequence_breakers": (MAX_DRY_BREAKERS, MAX_DRY_BREAKER_CHARS),
}
_BEAMS_ALONE = ("beam_width", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
# Beams draw nothing, and nothing is computed of a prompt but what follows it.
_NOT_WITH_BEAMS = (
    *DRAWING,
    "best_of",
    "prompt_logprobs",
    "logprob_token_ids",
    "logprobs_mode",
    "structured_outputs",
    "thinking_token_budget",
    "logits_processors",
    "stop_rules",
    "output_parser",
    "repetition_detection",
    "stop_regex",
)

# How the kinds of values are said.
_WORDS: Mapping[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def require_sound(params: SamplingParams) -> None:
    """Refuse what makes no sense.

    Raises:
        InvalidRequest: `field` is the name of the parameter.
    """
    all_kinds = _kinds(_class(params))
    for name, value in _given(params):
        if kinds := all_kinds.get(name):
            words = " or ".join(filter(None, map(_words, kinds)))
            require(any(_is_of(value, kind) for kind in kinds), name, f"must be {words}")
        if name in _RANGES and value is not None:
            holds, rule = _RANGES[name]
            require(holds(value), name, rule)
    _require_lists(params)
    _require_beams(params)
    _require_logprobs(params)
    _require_together(params)
    require_coherent_stages(params)


def _given(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """Yield what is not as it is by default, which is sound."""
    for name, default in _defaults(_class(params)).items():
        value = getattr(params, name)
        if value is not default:
            yield name, value


def _class(params: SamplingParams) -> Any:
    return type(params)     # of which mypy thinks that it has no hash


@cache
def _defaults(of: Any) -> Mapping[str, Any]:
    return {field.name: field.default for field in fields(of)}


@cache
def _kinds(of: Any) -> Mapping[str, tuple[Any, ...]]:
    """The kinds of values that each parameter takes; what is made by readers of its own has none."""
    hints = {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in get_type_hints(of).items()
    }
    return {name: kinds for name, kinds in hints.items() if any(map(_words, kinds))}


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    return _WORDS.get(kind, "")


def _is_of(value: object, kind: Any) -> bool:
    if kind is int:
        return _is_whole(value)
    if kind is float:
        return _is_number(value)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    return isinstance(value, kind)


def _require_lists(params: SamplingParams) -> None:
    for name, ids in params.token_ids().items():
        what = "have token ids as its keys" if name == "logit_bias" else "be whole numbers, 0 or more"
        require(all(_is_whole(i) and i >= 0 for i in ids), name, f"must {what}")
    require(
        len(params.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
        "stop_token_ids",
        f"takes at most {MAX_STOP_TOKEN_IDS} ids",
    )
    for name, (at_most, max_chars) in _TEXTS.items():
        _require_texts(getattr(params, name), name, at_most=at_most, max_chars=max_chars)
    _require_biases(params.logit_bias)
    left = set(params.allowed_token_ids) - set(params.suppress_tokens)
    require(bool(left) or not params.allowed_token_ids, "suppress_tokens", "leaves no allowed token")


def _require_beams(params: SamplingParams) -> None:
    """Refuse what beam search has no use for, or what without it means nothing."""
    searching, default = params.use_beam_search, _defaults(_class(params))
    rule = "cannot be combined with use_beam_search" if searching else "needs use_beam_search"
    for name in _NOT_WITH_BEAMS if searching else _BEAMS_ALONE:
        require(getattr(params, name) == default[name], name, rule)
    both = (params.num_beam_groups > 1) == (params.diversity_penalty > 0)
    require(both, "diversity_penalty", "above 0 and num_beam_groups above 1 need each other")


def _require_logprobs(params: SamplingParams) -> None:
    named = params.logprob_token_ids
    require(params.logprobs or not params.top_logprobs, "top_logprobs", "needs logprobs")
    require(params.logprobs or not named, "logprob_token_ids", "needs logprobs")
    require(not named or not params.top_logprobs, "logprob_token_ids", "goes without top_logprobs")
    require(params.logprobs or params.logprobs_mode == "raw", "logprobs_mode", "needs logprobs")
    require(
        len(set(named)) == len(named) <= MAX_LOGPROB_TOKEN_IDS,
        "logprob_token_ids",
        f"takes at most {MAX_LOGPROB_TOKEN_IDS} ids, each once",
    )


def _require_together(params: SamplingParams) -> None:
    require(
        params.structured_outputs is None or params.thinking_token_budget is None,
        "thinking_token_budget",
        "cannot be combined with structured_outputs",
    )
    require(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        "min_tokens",
        "must be at most max_tokens",
    )
    cuts = params.truncate_prompt_tokens is not None
    require(cuts or params.truncation_side == "left", "truncation_side", "needs truncate_prompt_tokens")
    require(
        params.spaces_between_special_tokens or not params.skip_special_tokens,
        "spaces_between_special_tokens",
        "needs skip_special_tokens: false",
    )
    require(params.best_of == 1 or params.temperature > 0, "best_of", "needs a temperature above 0")
    free = params.structured_outputs is None or not params.ignore_eos
    require(free, "ignore_eos", "cannot be combined with structured_outputs: these say where to end")
    salt = params.cache_salt
    require(
        salt is None or 0 < len(salt) <= MAX_CACHE_SALT_CHARS,
        "cache_salt",
        f"must have 1 to {MAX_CACHE_SALT_CHARS} characters",
    )


def _require_biases(biases: Mapping[int, float]) -> None:
    name = "logit_bias"
    require(len(biases) <= MAX_LOGIT_BIASES, name, f"takes at most {MAX_LOGIT_BIASES} ids")
    for token_id, bias in biases.items():
        holds = _is_number(bias) and -100 <= bias <= 100
        require(holds, f"{name}[{token_id}]", "must be a number between -100 and 100")


def _require_texts(texts: tuple[str, ...], name: str, *, at_most: int, max_chars: int) -> None:
    require(len(texts) <= at_most, name, f"takes at most {at_most} strings")
    for index, text in enumerate(texts):
        holds = isinstance(text, str) and 0 < len(text) <= max_chars
        require(holds, f"{name}[{index}]", f"must have 1 to {max_chars} characters")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    """Raise InvalidRequest, which says `field rule`, where it does not hold."""
    if not holds:
        raise InvalidRequest(f"{field} {rule}", field=field)
