"""Sampling params: how a caller wants tokens picked, and where the text is to stop."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypedDict

from genserve.errors import InvalidRequest
from genserve.plugin_call import PluginCall, PluginCallOptions, read_plugin_call, read_plugin_calls
from genserve.refused_methods import without_refused_methods
from genserve.repetition_detection import RepetitionDetection, repetition_detection
from genserve.sampling_stages import require_coherent_stages
from genserve.structured_outputs import StructuredOutputOptions, StructuredOutputs, structured_outputs

__all__ = ["MAX_BEST_OF", "MAX_TOP_LOGPROBS", "SamplingOptions", "SamplingParams", "sampling_params"]

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
DRY_BREAKERS = ("\n", ":", '"', "*")     # llama.cpp's

# What each number must be, and how that is said. None of these holds for a NaN.
_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
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
    "repetition_penalty": (lambda x: 0 < x <= 100, "must be above 0 and at most 100"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "must be between -2 and 2"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "must be between -2 and 2"),
    "length_penalty": (lambda x: -10 <= x <= 10, "must be between -10 and 10"),
}
_WHOLE_NUMBERS: Mapping[str, tuple[Callable[[int], bool], str]] = {
    "max_tokens": (lambda x: x >= 1, "must be at least 1"),
    "top_k": (lambda x: 0 <= x < 2**31, "must be between 0 (off) and 2^31 - 1"),
    "seed": (lambda x: 0 <= x < 2**64, "must be between 0 and 2^64 - 1"),
    "top_logprobs": (lambda x: 0 <= x <= MAX_TOP_LOGPROBS, f"must be between 0 and {MAX_TOP_LOGPROBS}"),
    "prompt_logprobs": (lambda x: 0 <= x <= MAX_TOP_LOGPROBS, f"must be between 0 and {MAX_TOP_LOGPROBS}"),
    "min_tokens": (lambda x: 0 <= x < 2**31, "must be between 0 (off) and 2^31 - 1"),
    "no_repeat_ngram_size": (lambda x: 0 <= x < 2**31, "must be between 0 (off) and 2^31 - 1"),
    "stream_interval": (lambda x: 1 <= x <= 1024, "must be between 1 and 1024"),
    "truncate_prompt_tokens": (
        lambda x: x == -1 or 1 <= x < 2**31,
        "must be -1 (what the context leaves), or between 1 and 2^31 - 1",
    ),
    "priority": (lambda x: -(2**31) <= x < 2**31, "must be between -2^31 and 2^31 - 1"),
    "max_time_ms": (lambda x: 1 <= x < 2**31, "must be between 1 and 2^31 - 1"),
    "beam_width": (lambda x: x >= 1, "must be at least 1"),
    "best_of": (lambda x: 1 <= x <= MAX_BEST_OF, f"must be between 1 and {MAX_BEST_OF}"),
    "penalty_window": (lambda x: 0 <= x < 2**31, "must be between 0 (all) and 2^31 - 1"),
    "dry_allowed_length": (lambda x: 1 <= x <= 128, "must be between 1 and 128"),
    "dry_penalty_last_n": (lambda x: -1 <= x < 2**31, "must be between -1 (all) and 2^31 - 1"),
    "mirostat_mode": (lambda x: 0 <= x <= 2, "must be 0 (off), 1 or 2"),
}
_MAY_BE_NONE = frozenset(
    {"max_tokens", "max_time_ms", "seed", "prompt_logprobs", "beam_width", "truncate_prompt_tokens"}
)
_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "suppress_tokens", "logprob_token_ids")
_FLAGS = ("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")
_LISTS = ("stop", "stop_regex", "bad_words", "samplers", "dry_sequence_breakers", *_TOKEN_IDS)
_BEAMS_ALONE = ("beam_width", "length_penalty", "early_stopping")
# Beams draw nothing, and nothing is computed of a prompt but what follows it.
_NOT_WITH_BEAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_n_sigma",
    "top_h",
    "xtc_probability",
    "mirostat_mode",
    "dynatemp_range",
    "samplers",
    "best_of",
    "prompt_logprobs",
    "logprob_token_ids",
    "logprobs_mode",
    "structured_outputs",
    "logits_processors",
    "stop_rules",
    "output_parser",
    "repetition_detection",
    "stop_regex",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop; checked once, when it is made.

    The order in which the rules are applied, and what each means, is in docs/sampling.md.

    Raises:
        InvalidRequest: a value is out of range; `field` is the name of the parameter.
    """

    max_tokens: int | None = None           # generated tokens only; None: all the room the context leaves
    min_tokens: int = 0                     # nothing that ends the text is picked before so many
    temperature: float = 0.0                # 0: greedy, ties go to the lowest id
    top_k: int = 0                          # keep the k best tokens; 0: all
    top_p: float = 1.0                      # keep the smallest set that reaches this probability; 1: all
    min_p: float = 0.0                      # keep what has this share of the best one's probability; 0: all
    typical_p: float = 1.0                  # keep those nearest to the entropy, up to this share; 1: all
    epsilon_cutoff: float = 0.0             # keep what has this probability; 0: all
    eta_cutoff: float = 0.0                 # the same, but less where the entropy is high; 0: all
    top_n_sigma: float = 0.0                # keep so many standard deviations of the logits; 0: all
    top_h: float = 0.0                      # keep the best up to this share of the entropy; 0: all
    xtc_probability: float = 0.0            # how often all but the last of the likely tokens are taken away
    xtc_threshold: float = 0.1              # tokens of this probability are likely
    mirostat_mode: int = 0                  # 1, 2: a cut that holds the surprise near mirostat_tau; 0: off
    mirostat_tau: float = 5.0               # bits per token
    mirostat_eta: float = 0.1               # how fast the cut follows what was drawn
    dynatemp_range: float = 0.0             # the temperature is up to so much lower or higher, by the entropy
    dynatemp_exponent: float = 1.0          # above 1: it is high only where the entropy is
    samplers: tuple[str, ...] = ()          # the stages of a draw in their order; empty: the default
    repetition_penalty: float = 1.0         # weakens, above 1, what is in the prompt or the answer
    frequency_penalty: float = 0.0          # off a token's logit for each time that the answer has it
    presence_penalty: float = 0.0           # off a token's logit if the answer has it
    penalty_window: int = 0                 # the last tokens that these three look at; 0: all
    dry_multiplier: float = 0.0             # off the logit of what would go on with a repetition; 0: off
    dry_base: float = 1.75                  # times this for each token that the repetition is longer
    dry_allowed_length: int = 2             # a repetition of so many tokens is the first that counts
    dry_penalty_last_n: int = -1            # the last tokens that are searched for it; 0: none, -1: all
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS   # no repetition reaches over these texts
    no_repeat_ngram_size: int = 0           # no run of so many tokens, prompt included, comes twice
    logit_bias: Mapping[int, float] = field(default_factory=dict)   # by token id, added before all else
    allowed_token_ids: tuple[int, ...] = ()     # nothing else is picked; empty: all are allowed
    suppress_tokens: tuple[int, ...] = ()       # ids that are never picked
    bad_words: tuple[str, ...] = ()             # texts whose last token is not picked after the others
    stop: tuple[str, ...] = ()              # the text ends before the first of these
    stop_regex: tuple[str, ...] = ()        # the text ends before the first match of one of these
    stop_token_ids: tuple[int, ...] = ()    # ends the text like the end-of-sequence token does
    include_stop_str_in_output: bool = False    # the text has what ended it
    skip_special_tokens: bool = True        # the text is without them
    spaces_between_special_tokens: bool = True  # or with them, and with what the tokenizer puts between them
    stream_interval: int = 1                # tokens that a part of a stream has, but the first and the last
    max_time_ms: int | None = None          # the answer ends then, counted from the request's arrival
    repetition_detection: RepetitionDetection | None = None     # ends what goes round in circles
    ignore_eos: bool = False                # go on after the end-of-sequence token (for benchmarks)
    use_beam_search: bool = False           # the likeliest answers instead of the likeliest tokens
    beam_width: int | None = None           # so many beams; None: as many as answers are asked for
    length_penalty: float = 1.0             # an answer's score is divided by its tokens to the power of this
    early_stopping: bool | Literal["never"] = False     # when beams end; see docs/sampling.md
    best_of: int = 1                        # so many answers are drawn, and the likeliest returned
    seed: int | None = None                 # same seed, same text, whatever else runs; None: a fresh one
    logprobs: bool = False                  # report the log-probability of each picked token
    top_logprobs: int = 0                   # beside it, those of so many of the most likely ones
    logprob_token_ids: tuple[int, ...] = ()     # or those of these tokens
    logprobs_mode: Literal["raw", "processed"] = "raw"     # of the answer: the model's, or after all rules
    prompt_logprobs: int | None = None      # the same for each token of the prompt; None: nothing
    structured_outputs: StructuredOutputs | None = None    # the form that the text has; None: any
    truncate_prompt_tokens: int | None = None   # a longer prompt is cut to this; None: never
    truncation_side: Literal["left", "right"] = "left"     # where a prompt is cut
    cache_salt: str | None = None           # who has the same one shares cached prefixes, nobody else
    priority: int = 0                       # of those that wait, the lowest number goes first
    logits_processors: tuple[PluginCall, ...] = ()  # of the model's plug-ins, in this order
    stop_rules: tuple[PluginCall, ...] = ()         # of the model's plug-ins: any of them ends the text
    output_parser: PluginCall | None = None         # of the model's plug-ins: what the text goes through

    def __post_init__(self) -> None:
        for name, (number_holds, rule) in _NUMBERS.items():
            value = getattr(self, name)
            _require(_is_number(value), name, "must be a number")
            _require(number_holds(value), name, rule)
        for name, (whole_holds, rule) in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _require(_is_whole(value), name, "must be a whole number")
                _require(whole_holds(value), name, rule)
        for name in _FLAGS:
            _require(isinstance(getattr(self, name), bool), name, "must be true or false")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must be at most max_tokens",
        )
        _require(isinstance(self.use_beam_search, bool), "use_beam_search", "must be true or false")
        stopping = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(stopping, "early_stopping", 'must be true, false or "never"')
        _require(self.truncation_side in ("left", "right"), "truncation_side", 'must be "left" or "right"')
        cuts = self.truncate_prompt_tokens is not None
        _require(cuts or self.truncation_side == "left", "truncation_side", "needs truncate_prompt_tokens")
        self._check_beams()
        _require(
            self.spaces_between_special_tokens or not self.skip_special_tokens,
            "spaces_between_special_tokens",
            "needs skip_special_tokens: false",
        )
        _require(self.best_of == 1 or self.temperature > 0, "best_of", "needs a temperature above 0")
        _require_logprobs(self)
        for name in _TOKEN_IDS:
            ids = getattr(self, name)
            _require(all(_is_whole(i) and i >= 0 for i in ids), name, "must be whole numbers, 0 or more")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"takes at most {MAX_STOP_TOKEN_IDS} ids",
        )
        _require_texts(self.stop, "stop", at_most=MAX_STOP_STRINGS, max_chars=MAX_STOP_STRING_CHARS)
        _require_texts(
            self.stop_regex, "stop_regex", at_most=MAX_STOP_REGEXES, max_chars=MAX_STOP_REGEX_CHARS
        )
        _require_texts(self.bad_words, "bad_words", at_most=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS)
        _require_texts(
            self.dry_sequence_breakers,
            "dry_sequence_breakers",
            at_most=MAX_DRY_BREAKERS,
            max_chars=MAX_DRY_BREAKER_CHARS,
        )
        require_coherent_stages(self)
        free = self.structured_outputs is None or not self.ignore_eos
        _require(free, "ignore_eos", "cannot be combined with structured_outputs: these say where to end")
        _require_biases(self.logit_bias)
        left = set(self.allowed_token_ids) - set(self.suppress_tokens)
        _require(bool(left) or not self.allowed_token_ids, "suppress_tokens", "leaves no allowed token")
        salt = self.cache_salt
        _require(
            salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT_CHARS),
            "cache_salt",
            f"must have 1 to {MAX_CACHE_SALT_CHARS} characters",
        )

    def _check_beams(self) -> None:
        """Refuse what beam search has no use for, or what without it means nothing."""
        default = SamplingParams.__dataclass_fields__
        searching = self.use_beam_search
        rule = "cannot be combined with use_beam_search" if searching else "needs use_beam_search"
        for name in _NOT_WITH_BEAMS if searching else _BEAMS_ALONE:
            _require(getattr(self, name) == default[name].default, name, rule)

    def changed(self) -> dict[str, Any]:
        """Return what is not as it is by default, by name, as JSON has it."""
        default = SamplingParams()
        names = [option.name for option in fields(self)]
        changed = {name: getattr(self, name) for name in names}
        changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
        return {name: _plain(value) for name, value in changed.items()}

    def token_ids(self) -> Mapping[str, Iterable[int]]:
        """Return the ids that it names, by parameter; each must be in the model's vocabulary."""
        return {"logit_bias": self.logit_bias, **{name: getattr(self, name) for name in _TOKEN_IDS}}


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and of the clients: `SamplingParams`, taken loosely."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    top_n_sigma: float
    top_h: float
    xtc_probability: float
    xtc_threshold: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    dynatemp_range: float
    dynatemp_exponent: float
    samplers: Sequence[str] | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_window: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str] | None
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    allowed_token_ids: Sequence[int] | None
    suppress_tokens: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    stop: str | Sequence[str] | None
    stop_regex: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    stream_interval: int
    max_time_ms: int | None
    repetition_detection: RepetitionDetection | Mapping[str, int] | None
    ignore_eos: bool
    use_beam_search: bool
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    best_of: int
    seed: int | None
    logprobs: bool
    top_logprobs: int
    logprob_token_ids: Sequence[int] | None
    logprobs_mode: Literal["raw", "processed"]
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputs | StructuredOutputOptions | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"]
    cache_salt: str | None
    priority: int
    logits_processors: Sequence[PluginCall | PluginCallOptions] | None
    stop_rules: Sequence[PluginCall | PluginCallOptions] | None
    output_parser: PluginCall | PluginCallOptions | None


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Make parameters from loose options; `stop` may be one string, the ids of `logit_bias` digits.

    Raises:
        InvalidRequest: an unknown name, with the nearest known one, or a value out of range.
    """
    known = [option.name for option in fields(SamplingParams)]
    values = without_refused_methods(options)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise InvalidRequest(f"there is no sampling parameter {name!r}", field=name, remedy=remedy)
    for name in ("allowed_token_ids", "samplers"):  # an empty list would allow nothing, while none allows all
        _require(values.get(name) not in ([], ()), name, "must not be empty")
    for name in _LISTS:
        if values.get(name) is None:
            values.pop(name, None)
        else:
            values[name] = _listed(values[name], name)
    values["structured_outputs"] = structured_outputs(values.get("structured_outputs"))
    values["logit_bias"] = _biases(values.get("logit_bias"))
    for name in ("logits_processors", "stop_rules"):
        values[name] = read_plugin_calls(values.get(name), field=name)
    if values.get("output_parser") is not None:
        values["output_parser"] = read_plugin_call(values["output_parser"], field="output_parser")
    values["repetition_detection"] = repetition_detection(values.get("repetition_detection"))
    return SamplingParams(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, PluginCall | RepetitionDetection):
        return asdict(value)
    if isinstance(value, StructuredOutputs):
        return value.as_options()
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _listed(value: Any, name: str) -> tuple[Any, ...]:
    of_texts = name not in _TOKEN_IDS
    what = "text, or a list of texts" if of_texts else "a list of whole numbers"
    _require(isinstance(value, Iterable) and not isinstance(value, Mapping), name, f"must be {what}")
    if isinstance(value, str):
        _require(of_texts, name, f"must be {what}")
        return (value,) if value else ()
    return tuple(value)


def _biases(value: Any) -> Mapping[int, float]:
    _require(value is None or isinstance(value, Mapping), "logit_bias", "must map token ids to numbers")
    return {_read_id(key): bias for key, bias in (value or {}).items()}


def _read_id(key: Any) -> Any:
    # JSON has no other keys than texts.
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _require_logprobs(params: SamplingParams) -> None:
    named = params.logprob_token_ids
    _require(params.logprobs or not params.top_logprobs, "top_logprobs", "needs logprobs")
    _require(params.logprobs or not named, "logprob_token_ids", "needs logprobs")
    _require(not named or not params.top_logprobs, "logprob_token_ids", "goes without top_logprobs")
    _require(
        len(set(named)) == len(named) <= MAX_LOGPROB_TOKEN_IDS,
        "logprob_token_ids",
        f"takes at most {MAX_LOGPROB_TOKEN_IDS} ids, each once",
    )
    _require(params.logprobs_mode in ("raw", "processed"), "logprobs_mode", "must be raw or processed")


def _require_biases(biases: Mapping[int, float]) -> None:
    name = "logit_bias"
    _require(len(biases) <= MAX_LOGIT_BIASES, name, f"takes at most {MAX_LOGIT_BIASES} ids")
    _require(all(_is_whole(i) and i >= 0 for i in biases), name, "must have token ids as its keys")
    for token_id, bias in biases.items():
        holds = _is_number(bias) and -100 <= bias <= 100
        _require(holds, f"{name}[{token_id}]", "must be a number between -100 and 100")


def _require_texts(texts: tuple[str, ...], name: str, *, at_most: int, max_chars: int) -> None:
    _require(len(texts) <= at_most, name, f"takes at most {at_most} strings")
    for index, text in enumerate(texts):
        holds = isinstance(text, str) and 0 < len(text) <= max_chars
        _require(holds, f"{name}[{index}]", f"must have 1 to {max_chars} characters")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as a sentence
    if not holds:
        raise InvalidRequest(f"{field} {rule}", field=field)
