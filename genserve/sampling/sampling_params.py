"""Sampling parameters: how a request wants its tokens drawn, and where its text ends."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypedDict, get_type_hints

from genserve.errors import InvalidRequest
from genserve.sampling.param_table import DRAWING, require, require_sound
from genserve.sampling.repetition_detection import RepetitionDetection, repetition_detection
from genserve.sampling.structured_outputs import (
    StructuredOutputOptions,
    StructuredOutputs,
    structured_outputs,
)

__all__ = [
    "PluginCall",
    "PluginCallOptions",
    "SamplingOptions",
    "SamplingParams",
    "read_plugin_call",
    "read_plugin_calls",
    "sampling_params",
    "unused_parameters",
    "without_refused_methods",
]


MAX_PLUGIN_CALLS = 16
MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginCall:
    """A plug-in of the model's decoder stage, by its name there.

    Whether there is one, and whether it takes these arguments, the model checks.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)   # JSON-serializable


class PluginCallOptions(TypedDict, total=False):
    """A `PluginCall`, taken loosely."""

    name: str
    args: Mapping[str, Any]


def read_plugin_calls(value: Any, *, field: str) -> tuple[PluginCall, ...]:
    """Read a list of calls; None is an empty one.

    Raises:
        InvalidRequest: it is something else; `field` has the place.
    """
    calls = () if value is None else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"{field} must be a list of plug-ins", field=field, remedy=_PLUGIN_REMEDY)
    if len(calls) > MAX_PLUGIN_CALLS:
        raise InvalidRequest(f"{field} takes at most {MAX_PLUGIN_CALLS} plug-ins", field=field)
    return tuple(read_plugin_call(call, field=f"{field}[{index}]") for index, call in enumerate(calls))


def read_plugin_call(value: Any, *, field: str) -> PluginCall:
    """Read one call. Raises what `read_plugin_calls` raises."""
    if isinstance(value, PluginCall):
        return value
    if not isinstance(value, Mapping) or "name" not in value or value.keys() - {"name", "args"}:
        raise InvalidRequest(f"{field} must have the keys name and args", field=field, remedy=_PLUGIN_REMEDY)
    name, args = value["name"], value.get("args", {})
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        rule = f"must be a text of 1 to {MAX_NAME_CHARS} characters"
        raise InvalidRequest(f"{field}.name {rule}", field=f"{field}.name")
    if not isinstance(args, Mapping):
        raise InvalidRequest(f"{field}.args must map names of arguments to values", field=f"{field}.args")
    return PluginCall(name=name, args=dict(args))


_PLUGIN_REMEDY = 'write {"name": "...", "args": {...}}'


_NO_HIDDEN_STATES = "needs the hidden states of the model, and the logits stage gives logits alone"
_SECOND_PROMPT = "needs a second forward without the prompt at each step, which the engine does not run"

# By parameter: why not, and the value with which a client asks for nothing.
_REFUSED: Mapping[str, tuple[str, object]] = {
    "penalty_alpha": (f"contrastive search {_NO_HIDDEN_STATES}", 0),
    "dola_layers": (f"DoLa {_NO_HIDDEN_STATES}", None),
    "guidance_scale": (f"classifier-free guidance {_SECOND_PROMPT}", 1),
    "watermark": ("watermarks are not written, and one that is asked for must not be missing", False),
}
# By parameter: how it is written today.
_RENAMED: Mapping[str, str] = {
    f"guided_{form}": f'structured_outputs: {{"{form}": ...}}'
    for form in ("json", "regex", "choice", "grammar")
}


def without_refused_methods(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those of methods that are not offered, where these ask for nothing.

    Raises:
        InvalidRequest: one asks for something; `field` is its name.
    """
    for name, (reason, neutral) in _REFUSED.items():
        if options.get(name) is not None and options[name] != neutral:
            raise InvalidRequest(f"{name} is not supported: {reason}", field=name, remedy="leave it out")
    for name, newer in _RENAMED.items():
        if options.get(name) is not None:
            message = f"{name} is not supported: it is now a part of structured_outputs"
            raise InvalidRequest(message, field=name, remedy=f"write {newer}")
    return {name: value for name, value in options.items() if name not in {*_REFUSED, *_RENAMED}}


DRY_BREAKERS = ("\n", ":", '"', "*")     # llama.cpp's


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
    num_beam_groups: int = 1                # the beams of a group compete with each other alone
    diversity_penalty: float = 0.0          # off what groups before have taken at the same step
    best_of: int = 1                        # so many answers are drawn, and the likeliest returned
    seed: int | None = None                 # same seed, same text, whatever else runs; None: a fresh one
    logprobs: bool = False                  # report the log-probability of each picked token
    top_logprobs: int = 0                   # beside it, those of so many of the most likely ones
    logprob_token_ids: tuple[int, ...] = ()     # or those of these tokens
    logprobs_mode: Literal["raw", "processed"] = "raw"     # of the answer: the model's, or after all rules
    prompt_logprobs: int | None = None      # the same for each token of the prompt; None: nothing
    structured_outputs: StructuredOutputs | None = None    # the form that the text has; None: any
    thinking_token_budget: int | None = None    # then the model's end tag follows; None: it thinks on
    truncate_prompt_tokens: int | None = None   # a longer prompt is cut to this; None: never
    truncation_side: Literal["left", "right"] = "left"     # where a prompt is cut
    cache_salt: str | None = None           # who has the same one shares cached prefixes, nobody else
    priority: int = 0                       # of those that wait, the lowest number goes first
    logits_processors: tuple[PluginCall, ...] = ()  # of the model's plug-ins, in this order
    stop_rules: tuple[PluginCall, ...] = ()         # of the model's plug-ins: any of them ends the text
    output_parser: PluginCall | None = None         # of the model's plug-ins: what the text goes through

    def __post_init__(self) -> None:
        require_sound(self)

    def changed_names(self) -> list[str]:
        """Return the names of what is not as it is by default."""
        return [name for name, default in _defaults().items() if getattr(self, name) != default]

    def changed(self) -> dict[str, Any]:
        """Return what is not as it is by default, by name, as JSON has it."""
        return {name: _plain(getattr(self, name)) for name in self.changed_names()}

    def token_ids(self) -> Mapping[str, Iterable[int]]:
        """Return the ids that it names, by parameter; each must be in the model's vocabulary."""
        return {"logit_bias": self.logit_bias, **{name: getattr(self, name) for name in _lists(int)}}


@cache
def _defaults() -> Mapping[str, Any]:
    default = SamplingParams()
    return {option.name: getattr(default, option.name) for option in fields(default)}


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
    num_beam_groups: int
    diversity_penalty: float
    best_of: int
    seed: int | None
    logprobs: bool
    top_logprobs: int
    logprob_token_ids: Sequence[int] | None
    logprobs_mode: Literal["raw", "processed"]
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputs | StructuredOutputOptions | None
    thinking_token_budget: int | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"]
    cache_salt: str | None
    priority: int
    logits_processors: Sequence[PluginCall | PluginCallOptions] | None
    stop_rules: Sequence[PluginCall | PluginCallOptions] | None
    output_parser: PluginCall | PluginCallOptions | None


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Make parameters from loose options: `stop` may be one string, `top_k` -1, ids of `logit_bias` digits.

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
    if values.get("top_k") == -1:   # vLLM's word for all
        values["top_k"] = 0
    for name in ("allowed_token_ids", "samplers"):  # an empty list would allow nothing, while none allows all
        require(values.get(name) not in ([], ()), name, "must not be empty")
    for name in (*_lists(str), *_lists(int)):
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


@cache
def _lists(of: type) -> tuple[str, ...]:
    """The parameters that are lists of so a kind."""
    hints = get_type_hints(SamplingParams)
    return tuple(name for name, hint in hints.items() if hint == tuple[of, ...])  # type: ignore[valid-type]


def _plain(value: Any) -> Any:
    if isinstance(value, PluginCall | RepetitionDetection):
        return asdict(value)
    if isinstance(value, StructuredOutputs):
        return value.as_options()
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _listed(value: Any, name: str) -> tuple[Any, ...]:
    of_texts = name in _lists(str)
    what = "text, or a list of texts" if of_texts else "a list of whole numbers"
    require(isinstance(value, Iterable) and not isinstance(value, Mapping), name, f"must be {what}")
    if isinstance(value, str):
        require(of_texts, name, f"must be {what}")
        return (value,) if value else ()
    return tuple(value)


def _biases(value: Any) -> Mapping[int, float]:
    require(value is None or isinstance(value, Mapping), "logit_bias", "must map token ids to numbers")
    return {_read_id(key): bias for key, bias in (value or {}).items()}


def _read_id(key: Any) -> Any:
    # JSON has no other keys than texts.
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
# By parameter: those of which one must ask for something.
_SWITCHES: Mapping[str, Sequence[str]] = {
    "xtc_threshold": ("xtc_probability",),
    "mirostat_tau": ("mirostat_mode",),
    "mirostat_eta": ("mirostat_mode",),
    "dynatemp_exponent": ("dynatemp_range",),
    "penalty_window": _PENALTIES,
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_penalty_last_n": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
}


def unused_parameters(params: SamplingParams) -> list[str]:
    """Return the parameters that are not as by default and change nothing.

    These are the details of a rule that is off, and where nothing is drawn, all that a draw is made from.
    """
    given = frozenset(params.changed_names())
    idle = [name for name, switches in _SWITCHES.items() if name in given and given.isdisjoint(switches)]
    greedy = params.temperature == 0
    return idle + [name for name in DRAWING if greedy and name in given]
