"""Sampling parameters: how a request wants its tokens sampled, and where its text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from genserve.errors import InvalidRequest, require, suggestion
from genserve.sampling.param_table import Param, Range, is_number, is_token_id, param, param_table, validate
from genserve.sampling.plugin_call import PluginCall, read_plugin_call, read_plugin_calls
from genserve.sampling.repetition_detection import RepetitionDetection, repetition_detection
from genserve.sampling.structured_outputs import StructuredOutputs, structured_outputs

MAX_BEST_OF = 128
MAX_STOP_STRINGS = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_CACHE_SALT_CHARS = 256
_INT_MAX = 2**31 - 1

_BEAMS = "use_beam_search"
_CHANGED: tuple[str, ...] = ("those in `changed`",)     # if no request has stated them
_COUNT = Range(0, _INT_MAX, "off")
_SHARE = Range(0, 1, "off")
_OF_DRY = ("dry_multiplier",)
_OF_MIROSTAT = ("mirostat_mode",)

_logits = partial(param, section="logits")
_draw = partial(param, section="draw")
_sampler = partial(_draw, excludes=(_BEAMS, "mirostat_mode"))
_beams = partial(param, section="beams", requires=_BEAMS)
_end = partial(param, section="end")
_text = partial(param, section="text")
_logprobs = partial(param, section="logprobs")
_prompt = partial(param, section="prompt")

_NO_HIDDEN_STATES = "needs the hidden states of the model, and the logits stage returns only logits"
_SECOND_PROMPT = "needs a second forward without the prompt in each step, which the engine does not run"
# Methods of other servers that are not offered: the reason, and the neutral value.
_REJECTED_METHODS: Mapping[str, tuple[str, object]] = {
    "penalty_alpha": (f"contrastive search {_NO_HIDDEN_STATES}", 0),
    "dola_layers": (f"DoLa {_NO_HIDDEN_STATES}", None),
    "guidance_scale": (f"classifier-free guidance {_SECOND_PROMPT}", 1),
    "watermark": ("no watermark is written", False),
}
# Names that vLLM has replaced, and the newer ones.
_REPLACED: Mapping[str, str] = {
    f"guided_{form}": f'structured_outputs: {{"{form}": ...}}'
    for form in ("json", "regex", "choice", "grammar")
}
REJECTED = (*_REJECTED_METHODS, *_REPLACED)


# ruff: noqa: RUF009  # a row is a constant
@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitsParams:
    """The rows of the parameters that edit logits, in the order in which they are applied."""

    structured_outputs: StructuredOutputs | None = _logits(
        "the form of the text ([structured_outputs.md](structured_outputs.md)): -inf for tokens that "
        "violate it",
        default=None, excludes=(_BEAMS,), tgi="grammar",
    )
    allowed_token_ids: tuple[int, ...] = _logits("-inf for all other tokens", default=())
    logit_bias: Mapping[int, float] = _logits(
        "by token id, a number from -100 to 100 that is added", default={}
    )
    repetition_penalty: float = _logits(
        "of tokens in prompt or answer, logits above 0 are divided by it, others multiplied",
        default=1.0, range=Range(0.01, 100), common=True, triton="repetition_penalty",  # 1e-40: 0 in float32
        generation_config="repetition_penalty",
    )
    frequency_penalty: float = _logits(
        "subtracted for each time that the answer has the token",
        default=0.0, range=Range(-2, 2), common=True, triton="frequency_penalty",
    )
    presence_penalty: float = _logits(
        "subtracted if the answer has the token",
        default=0.0, range=Range(-2, 2), common=True, triton="presence_penalty",
    )
    penalty_window: int = _logits(
        "how many of the last tokens the repetition, frequency and presence penalties consider",
        default=0, range=Range(0, _INT_MAX, "all"),
        unused_without=("repetition_penalty", "frequency_penalty", "presence_penalty"),
    )
    dry_multiplier: float = _logits(
        "subtracted from tokens that would continue a repetition in prompt or answer, times `dry_base` for "
        "each token that it is longer than `dry_allowed_length`",
        default=0.0, range=Range(0, 100, "off"),
    )
    dry_base: float = _logits(
        "see `dry_multiplier`", default=1.75, range=Range(1, 100), unused_without=_OF_DRY
    )
    dry_allowed_length: int = _logits(
        "the length of the shortest repetition that counts",
        default=2, range=Range(1, 128), unused_without=_OF_DRY,
    )
    dry_penalty_last_n: int = _logits(
        "how many of the last tokens are searched for a repetition; 0: none",
        default=-1, range=Range(-1, _INT_MAX, "all"), unused_without=_OF_DRY,
    )
    dry_sequence_breakers: tuple[str, ...] = _logits(
        "texts that no repetition extends over",
        default=("\n", ":", '"', "*"), max_items=32, max_chars=40, unused_without=_OF_DRY,     # llama.cpp's
    )
    no_repeat_ngram_size: int = _logits(
        "-inf for tokens that would repeat a run of this length in prompt or answer",
        default=0, range=_COUNT, generation_config="no_repeat_ngram_size",
    )
    bad_words: tuple[str, ...] = _logits(
        "-inf for the last token of a text whose other tokens precede it, with and without a space before "
        "the text",
        default=(), max_items=256, max_chars=256, triton="bad_words",
    )
    min_tokens: int = _logits(
        "before the answer has this number of tokens, -inf for end-of-sequence (unless `ignore_eos`) and "
        "`stop_token_ids`",
        default=0, range=_COUNT, triton="min_tokens",
    )
    suppress_tokens: tuple[int, ...] = _logits("-inf for these tokens", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawParams(_LogitsParams):
    """The rows of the parameters of a draw: the samplers in their default order, and further ones."""

    temperature: float = _draw(
        "divides the logits. 0: the best token is taken, of equals the lowest id, and all other parameters "
        "of the draw are off",
        default=0.0, range=Range(0, 100), neutral=1.0, sampler="temperature", common=True, own_field=True,
        excludes=(_BEAMS,), triton="temperature",
        generation_config="temperature",
    )
    dynatemp_range: float = _draw(
        "the temperature is lower by up to this where the entropy is low, and higher where it is high",
        default=0.0, range=Range(0, 100, "off"), sampler="temperature", excludes=(_BEAMS,),
    )
    dynatemp_exponent: float = _draw(
        "above 1, the dynamic temperature is high only where the entropy is",
        default=1.0, range=Range(0, 100, above=True), unused_without=("dynatemp_range",),
    )
    top_n_sigma: float = _sampler(
        "keeps the logits within this number of standard deviations of the best one",
        default=0.0, range=Range(0, 100, "off"), sampler="top_n_sigma",
    )
    top_h: float = _sampler(
        "of the 100 likeliest tokens, keeps the best ones until they have this share of the entropy",
        default=0.0, range=_SHARE, sampler="top_h",
        generation_config="top_h",
    )
    top_k: int = _sampler(
        "keeps this number of best tokens; -1 is off, too",
        default=0, range=_COUNT, sampler="top_k", common=True, own_field=True, triton="top_k",
        generation_config="top_k",
    )
    top_p: float = _sampler(
        "keeps the smallest set of tokens with this share of the probability",
        default=1.0, range=Range(0, 1, "the best token"), sampler="top_p", common=True, triton="top_p",
        generation_config="top_p",
    )
    min_p: float = _sampler(
        "keeps the tokens with this share of the best one's probability",
        default=0.0, range=_SHARE, sampler="min_p", common=True,
        generation_config="min_p",
    )
    typical_p: float = _sampler(
        "keeps the tokens whose surprise is nearest to the entropy, up to this share of the probability",
        default=1.0, range=Range(0, 1, above=True), sampler="typical_p",
        generation_config="typical_p",
    )
    epsilon_cutoff: float = _sampler(
        "keeps the tokens of at least this probability, and the best one",
        default=0.0, range=Range(0, 1, "off", below=True), sampler="epsilon_cutoff",
        generation_config="epsilon_cutoff",
    )
    eta_cutoff: float = _sampler(
        "keeps the tokens of at least min(eta, sqrt(eta) * e^-entropy), and the best one",
        default=0.0, range=Range(0, 1, "off", below=True), sampler="eta_cutoff",
        generation_config="eta_cutoff",
    )
    xtc_probability: float = _sampler(
        "how often all likely tokens but the least likely of them are removed; never, if end-of-sequence "
        "or a newline is among them",
        default=0.0, range=_SHARE, sampler="xtc",
    )
    xtc_threshold: float = _draw(
        "the probability from which a token is likely",
        default=0.1, range=Range(0, 1), unused_without=("xtc_probability",),
    )
    samplers: tuple[str, ...] = _sampler("the names of the samplers in another order", default=(), draws=True)
    mirostat_mode: int = _draw(
        "1, 2: replaces all samplers but the temperature with a cut that holds the surprise near "
        "`mirostat_tau`",
        default=0, range=Range(0, 2, "off"), draws=True, excludes=(_BEAMS,),
    )
    mirostat_tau: float = _draw(
        "bits per token", default=5.0, range=Range(0, 100), unused_without=_OF_MIROSTAT
    )
    mirostat_eta: float = _draw(
        "how fast the cut adapts to the tokens drawn",
        default=0.1, range=Range(0, 1), unused_without=_OF_MIROSTAT,
    )
    seed: int | None = _draw(
        "the same seed gives the same text, whatever else runs; choice i uses seed + i; without one, "
        "the server draws it",
        default=None, range=Range(0, 2**64 - 1), common=True, own_field=True, triton="random_seed",
    )
    best_of: int = _draw(
        "how many answers are drawn to return the likeliest",
        default=1, range=Range(1, MAX_BEST_OF), own_field=True, excludes=(_BEAMS,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_DrawParams):
    """How tokens are sampled and where the text ends; validated when it is made.

    The fields, base classes included, are the table of sampling parameters. After a change of the table,
    `python scripts/sampling_options.py` writes `SamplingOptions`.

    Raises:
        InvalidRequest: a value is out of range; `field` is the name of the parameter.
    """

    use_beam_search: bool = param(
        "search the likeliest answers, instead of sampling", default=False, section="beams"
    )
    beam_width: int | None = _beams(
        "the number of beams, up to the model's `max_batch_size`; `n` by default, and 1 is greedy",
        default=None, range=Range(1), triton="beam_width",
    )
    length_penalty: float = _beams(
        "an answer's score is the sum of its log-probabilities, divided by its number of tokens to this "
        "power: above 0, longer answers gain",
        default=1.0, range=Range(-10, 10), triton="length_penalty",
    )
    early_stopping: bool | Literal["never"] = _beams(
        '`true`: the search ends when as many answers as beams are complete. `false`: when no beam would '
        'be better if it were complete now. `"never"`: when none can become better',
        default=False, triton="early_stopping",
    )
    num_beam_groups: int = _beams(
        "a divisor of the width: beams compete within their group only", default=1, range=Range(1)
    )
    diversity_penalty: float = _beams(
        "subtracted from a token for each time that an earlier group took it in the same step",
        default=0.0, range=Range(0, 100),
    )

    max_tokens: int | None = _end(
        "this number of tokens ends the answer; without it, the end of the context (`/v1/completions`: 16)",
        default=None, range=Range(1), common=True, own_field=True, tgi="max_new_tokens", triton="max_tokens",
        generation_config="max_new_tokens",
    )
    max_time_ms: int | None = _end(
        "the answer ends after this time since the request arrived, including time in the queue",
        default=None, range=Range(1, _INT_MAX),
    )
    stop: tuple[str, ...] = _end(
        "the text ends before the first of these, whatever its tokens",
        default=(), max_items=MAX_STOP_STRINGS, max_chars=256, common=True, own_field=True,
        triton="stop_words",
    )
    stop_regex: tuple[str, ...] = _end(
        "the text ends before the first match of one of these",
        default=(), max_items=4, max_chars=512, one_text=True, excludes=(_BEAMS,),
    )
    stop_token_ids: tuple[int, ...] = _end(
        "these end the answer, as end-of-sequence does", default=(), max_items=256
    )
    stop_rules: tuple[PluginCall, ...] = _end(
        "plug-ins of the model, which can end the answer", default=(), excludes=(_BEAMS,)
    )
    repetition_detection: RepetitionDetection | None = _end(
        '`{"max_pattern_size": 20, "min_count": 4}`: a pattern of up to 20 tokens (at least '
        '`min_pattern_size`, 1), 4 times in a row, ends the answer',
        default=None, excludes=(_BEAMS,),
    )
    ignore_eos: bool = _end(
        "end-of-sequence does not end the answer (for benchmarks)",
        default=False, excludes=("structured_outputs",),
    )
    include_stop_str_in_output: bool = _end("the text includes the stop that ended it", default=False)

    skip_special_tokens: bool = _text("the text omits special tokens", default=True)
    spaces_between_special_tokens: bool = _text(
        "with special tokens: also the separators between them", default=True
    )
    stream_interval: int = _text(
        "how many tokens an event of a stream has; the first event comes with the first token",
        default=1, range=Range(1, 1024),
    )
    thinking_token_budget: int | None = _text(
        "after this number of tokens, reasoning is ended (models with `<think>` and `</think>`)",
        default=None, range=Range(0, _INT_MAX), excludes=(_BEAMS, "structured_outputs"),
    )
    reasoning_budget_message: str | None = _text(
        "what reasoning that is ended says last; without it, Qwen's sentence ([reasoning.md](reasoning.md))",
        default=None, max_chars=1024, min_chars=0, generation_config="reasoning_budget_message",
    )
    logits_processors: tuple[PluginCall, ...] = _text(
        "plug-ins of the model, which edit the logits in this order", default=(), excludes=(_BEAMS,)
    )
    output_parser: PluginCall | None = _text(
        "the plug-in of the model that rewrites the text", default=None, excludes=(_BEAMS,)
    )

    return_receipt: bool = _text(
        "the answer has a receipt, by which `genserve verify` repeats it on any machine "
        "([reliability.md](reliability.md#receipts))",
        default=False, excludes=(_BEAMS, "best_of", "max_time_ms"),
    )

    logprobs: bool = _logprobs(
        "report the log-probability of each token of the answer", default=False, own_field=True
    )
    top_logprobs: int = _logprobs(
        "report the log-probabilities of this number of most likely tokens, too",
        default=0, range=Range(0, MAX_TOP_LOGPROBS), own_field=True, requires="logprobs", tgi="top_n_tokens",
    )
    logprob_token_ids: tuple[int, ...] = _logprobs(
        "report the log-probabilities of these tokens instead: one token is enough to choose among given "
        "answers",
        default=(), max_items=256, own_field=True, requires="logprobs", excludes=(_BEAMS, "top_logprobs"),
    )
    logprobs_mode: Literal["raw", "processed"] = _logprobs(
        "`raw`: of the model. `processed`: after all rules",
        default="raw", requires="logprobs", excludes=(_BEAMS,),
    )
    prompt_logprobs: int | None = _logprobs(
        "report the log-probability of each token of the prompt, and those of this number of most likely "
        "tokens in its place",
        default=None, range=Range(0, MAX_TOP_LOGPROBS), own_field=True, excludes=(_BEAMS,),
        tgi="decoder_input_details",
    )

    add_special_tokens: bool | None = _prompt(
        "begin the prompt with the tokens that begin every text; by default only a text does, since the "
        "template of a chat writes them",
        default=None,
    )
    truncate_prompt_tokens: int | None = _prompt(
        "a longer prompt is truncated to this number of tokens; without it, it is rejected",
        default=None, range=Range(1, _INT_MAX, extra=-1, extra_means="as many as max_tokens leaves room for"),
        tgi="truncate",
    )
    truncation_side: Literal["left", "right"] = _prompt(
        "`left` keeps the last tokens, and the one that begins every text; `right` the first",
        default="left", requires="truncate_prompt_tokens",
    )
    cache_salt: str | None = _prompt(
        "cached prefixes are shared only by requests with the same salt",
        default=None, max_chars=MAX_CACHE_SALT_CHARS,
    )
    return_cache_match: bool = _prompt(
        "report how far the prompt was in the prefix cache, and what was different there "
        "([http_api.md](http_api.md#why-a-prompt-was-not-cached))",
        default=False,
    )
    priority: int = _prompt(
        "of waiting requests, those with the lowest number go first; running ones are not stopped for them",
        default=0, range=Range(-(2**31), _INT_MAX),
    )

    # Which of the parameters in `GENERATION_CONFIG` the request gives, even as their default.
    stated: tuple[str, ...] = _CHANGED
    # The names of the parameters that are not at their default.
    changed: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "changed", validate(_values(self), PARAMETERS))
        if self.stated is _CHANGED:
            stated = (name for name in self.changed if name in GENERATION_CONFIG.values())
            object.__setattr__(self, "stated", tuple(stated))
        _validate_together(self)
        _validate_stages(self)

    def given(self) -> dict[str, Any]:
        """Return the parameters that are stated or not at their default, by name, as JSON values."""
        names = {*self.stated, *self.changed}
        return {name: _as_json(getattr(self, name)) for name in PARAMETERS if name in names}

    def token_ids(self) -> Mapping[str, Iterable[int]]:
        """Return the token ids of the request, by parameter; each must be in the model's vocabulary."""
        lists = {name: getattr(self, name) for name, row in PARAMETERS.items() if row.item is int}
        return {"logit_bias": self.logit_bias, **lists}


PARAMETERS: Mapping[str, Param] = param_table(SamplingParams)
_values = attrgetter(*PARAMETERS)
# The samplers in their default order, with the parameters that turn each on and their neutral values.
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    sampler: {name: row.neutral for name, row in PARAMETERS.items() if row.sampler == sampler}
    for sampler in dict.fromkeys(row.sampler for row in PARAMETERS.values() if row.sampler is not None)
}
# The parameters that affect draws only, and their neutral values.
DRAW_PARAMETERS: Mapping[str, Any] = {
    name: row.neutral for name, row in PARAMETERS.items() if row.sampler is not None or row.draws
}
# The parameters that turn on an edit of the logits.
EDIT_PARAMETERS = tuple(
    name
    for name, row in PARAMETERS.items()
    if row.section == "logits" and not row.unused_without and name != "structured_outputs"
)
# The parameters that have an input tensor in Triton's repositories of language models, by its name.
TRITON_TENSORS: Mapping[str, Param] = {row.triton: row for row in PARAMETERS.values() if row.triton}
# The parameters that a model may have a default of, by the key of generation_config.json.
GENERATION_CONFIG: Mapping[str, str] = {
    row.generation_config: name for name, row in PARAMETERS.items() if row.generation_config
}
_TEXTS = tuple(name for name, row in PARAMETERS.items() if row.item is str)
_IDS = tuple(name for name, row in PARAMETERS.items() if row.item is int)


def active(params: SamplingParams, samplers: Iterable[str]) -> Iterator[str]:
    """Yield the parameters of these samplers that are not neutral."""
    for sampler in samplers:
        for name, neutral in SAMPLERS[sampler].items():
            if getattr(params, name) != neutral:
                yield name


def _validate_together(params: SamplingParams) -> None:
    """Validate combinations of parameters that no single row describes."""
    _validate_biases(params.logit_bias)
    allowed = set(params.allowed_token_ids) - set(params.suppress_tokens)
    any_left = bool(allowed) or not params.allowed_token_ids
    require(any_left, "suppress_tokens", "contains every id of allowed_token_ids")
    grouped = (params.num_beam_groups > 1) == (params.diversity_penalty > 0)
    require(grouped, "diversity_penalty", "must be above 0 exactly if num_beam_groups is above 1")
    ids = params.logprob_token_ids
    require(len(set(ids)) == len(ids), "logprob_token_ids", "must not repeat an id")
    long_enough = params.max_tokens is None or params.min_tokens <= params.max_tokens
    require(long_enough, "min_tokens", "must be at most max_tokens")
    shown = params.spaces_between_special_tokens or not params.skip_special_tokens
    require(shown, "spaces_between_special_tokens", "needs skip_special_tokens: false")
    require(params.best_of == 1 or params.temperature > 0, "best_of", "needs a temperature above 0")


def _validate_biases(biases: Mapping[int, float]) -> None:
    name = "logit_bias"
    require(len(biases) <= MAX_LOGIT_BIASES, name, f"takes at most {MAX_LOGIT_BIASES} ids")
    require(all(map(is_token_id, biases)), name, "must have token ids as its keys")
    for token_id, bias in biases.items():
        holds = is_number(bias) and -100 <= bias <= 100
        require(holds, f"{name}[{token_id}]", "must be a number between -100 and 100")


def _validate_stages(params: SamplingParams) -> None:
    """Validate the names of `samplers`, and that it has the samplers of all parameters that are given."""
    names = params.samplers
    for index, name in enumerate(names):
        field = f"samplers[{index}]"
        if not isinstance(name, str) or name not in SAMPLERS:
            problem, remedy = "is not the name of a sampler", suggestion(str(name), known=SAMPLERS)
            raise InvalidRequest(f"{field} {problem}", field=field, remedy=remedy)
        if name in names[:index]:
            raise InvalidRequest(f"{field} repeats {name!r}", field=field, remedy="name each sampler once")
    if names and params.temperature > 0:
        for name in active(params, [sampler for sampler in SAMPLERS if sampler not in names]):
            raise InvalidRequest(
                f"{name} has no effect, since samplers omits its sampler",
                field=name,
                remedy="add it to samplers, or leave the parameter out",
            )


def unused_parameters(params: SamplingParams) -> list[str]:
    """Return the parameters that the request sets and that have no effect, given its other parameters.

    They are the details of a rule that is off, and all parameters of a draw if nothing is drawn.
    """
    changed = params.changed
    greedy = params.temperature == 0
    from_model = {*GENERATION_CONFIG.values()}.difference(params.stated)
    return [
        name
        for name in changed
        if (greedy and name in DRAW_PARAMETERS and name not in from_model)
        or (PARAMETERS[name].unused_without and not {*PARAMETERS[name].unused_without}.intersection(changed))
    ]


def sampling_params(
    options: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> SamplingParams:
    """Make parameters from options as a client writes them.

    `stop` may be one string, `top_k` -1, the ids of `logit_bias` digits, and lists None.

    Args:
        options: the parameters that the request states; None: not stated. `with_model_defaults` fills in the
            model's defaults for parameters that are not stated.
        defaults: the dialect's defaults, for what neither the request nor the model states.

    Raises:
        InvalidRequest: an unknown name, with the nearest known one as the remedy, or a value out of range.
    """
    stated = tuple(name for name in GENERATION_CONFIG.values() if options.get(name) is not None)
    values = without_rejected_methods(options)
    values |= {name: default for name, default in defaults.items() if values.get(name) is None}
    for name in values:
        if name not in PARAMETERS:
            raise InvalidRequest(
                f"there is no sampling parameter {name!r}",
                field=name,
                remedy=suggestion(name, known=PARAMETERS),
            )
    if values.get("top_k") == -1:   # all, as in vLLM
        values["top_k"] = 0
    for name in ("allowed_token_ids", "samplers"):  # an empty list would allow nothing, the default all
        require(values.get(name) not in ([], ()), name, "must not be empty")
    for name, read in _READERS.items():
        if name in values:
            written = values.pop(name)
            if written is not None:
                values[name] = read(written, field=name)
    return SamplingParams(**values, stated=stated)


def _as_json(value: Any) -> Any:
    if isinstance(value, PluginCall | RepetitionDetection):
        return asdict(value)
    if isinstance(value, StructuredOutputs):
        return value.as_options()
    return [_as_json(part) for part in value] if isinstance(value, tuple) else value


def _listed(value: Any, *, field: str) -> tuple[Any, ...]:
    words = "text, or a list of texts" if field in _TEXTS else "a list of whole numbers"
    require(isinstance(value, Iterable) and not isinstance(value, Mapping), field, f"must be {words}")
    if isinstance(value, str):
        require(field in _TEXTS, field, f"must be {words}")
        return (value,) if value else ()
    return tuple(value)


def _biases(value: Any, *, field: str) -> Mapping[int, float]:
    require(isinstance(value, Mapping), field, "must map token ids to numbers")
    biases = {_read_id(key): bias for key, bias in value.items()}
    require(len(biases) == len(value), field, "must not give an id twice, such as 1 and 01")
    return biases


def _read_id(key: Any) -> Any:
    # Keys of JSON are texts.
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


# How the values are read that clients write in another form, by parameter; a null is the default.
_READERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys((*_TEXTS, *_IDS), _listed),
    "structured_outputs": structured_outputs,
    "logit_bias": _biases,
    "logits_processors": read_plugin_calls,
    "stop_rules": read_plugin_calls,
    "output_parser": read_plugin_call,
    "repetition_detection": repetition_detection,
}


def without_rejected_methods(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the options of methods that are not offered, if they are neutral.

    Raises:
        InvalidRequest: such an option is not neutral; `field` is its name.
    """
    for name, (reason, neutral) in _REJECTED_METHODS.items():
        if options.get(name) is not None and options[name] != neutral:
            raise InvalidRequest(f"{name} is not supported: {reason}", field=name, remedy="leave it out")
    for name, newer in _REPLACED.items():
        if options.get(name) is not None:
            message = f"{name} is not supported: use structured_outputs"
            raise InvalidRequest(message, field=name, remedy=f"write {newer}")
    return {name: value for name, value in options.items() if name not in REJECTED}
