"""Trace settings: which requests are traced, by the server and by model, with Triton's names."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from genserve.errors import GenserveError, InferenceError, Status
from genserve.request_context import current_request
from genserve.server.kserve.triton_parsing import leading_number
from genserve.tracing import Trace, TraceFile

Value: TypeAlias = str | Sequence[str]
_DEFAULTS: Mapping[str, Value] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_MAX = 2**32 - 1
_LEVELS = ("TIMESTAMPS", "TENSORS")
_INVALID = "Attempting to set invalid trace setting :"
_SETTABLE = frozenset({"trace_level", "trace_rate", "trace_count", "log_frequency"})
# The settings of `--trace-config`, with the protocol's names.
_FLAGS: Mapping[str, str] = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "triton,file": "trace_file",
    "triton,log-frequency": "log_frequency",
}
# tritonserver's words for levels, some of which date from when there was only one level.
_LEVEL_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("off", "false"), "OFF"),
    **dict.fromkeys(("timestamps", "true", "on", "min", "max"), "TIMESTAMPS"),
    "tensors": "TENSORS",
}


class TraceSettings:
    """The settings of one server, and the traces that they request. Safe from any thread.

    Attributes:
        enabled: whether any request may be traced.
    """

    def __init__(self, given: Mapping[str, Value] | None = None) -> None:
        """Begin with the given settings; all others have their defaults.

        Raises:
            InferenceError: a level without a file, or with a rate of 0.
            GenserveError: the folder of `trace_file` is not writable.
        """
        self._lock = threading.Lock()
        self._start = {**_DEFAULTS, **(given or {})}
        self._server: dict[str, Value] = {}
        self._models: dict[str, dict[str, Value]] = {}
        path = Path(str(self._start["trace_file"]))
        if path.name and not os.access(path.parent, os.W_OK):
            raise GenserveError(
                f"traces cannot be written to {path}: its folder does not exist or is not writable",
                remedy="choose another file with --trace-config triton,file=PATH",
            )
        self._file = TraceFile(path) if path.name else None
        self._file_name = path.name     # clients do not see its folder
        self._samplers = {"": self._checked_sampler(self._start)}  # by model; "": for all other models
        self.enabled = self._samplers[""].traces

    def values(self, model: str = "") -> dict[str, Value]:
        """Return all settings of the server or of a model, in Triton's order.

        `trace_count` is the number of remaining traces, `trace_file` the name without its folder.
        """
        with self._lock:
            sampler = self._samplers.get(model) or self._samplers[""]
            values = {**self._start, **self._server, **self._models.get(model, {})}
            return {**values, "trace_count": str(sampler.count), "trace_file": self._file_name}

    def update(self, changes: Mapping[str, Value | None], *, model: str = "") -> dict[str, Value]:
        """Change settings of the server or of one model, and return all of its settings.

        Args:
            changes: strings by name; the level is a list of strings. None resets a setting. Unknown names and
                the mode are ignored.
            model: "": the server.

        Raises:
            InferenceError: UNSUPPORTED, the file; INVALID_ARG, an invalid number, or a level that needs a
                file or a rate. Nothing was changed.
        """
        if "trace_file" in changes:
            text = "trace file location can not be updated through network protocol"
            raise InferenceError(text, status=Status.UNSUPPORTED)
        known = {name: _checked(name, value) for name, value in changes.items() if name in _SETTABLE}
        if known.get("trace_level") == []:
            del known["trace_level"]
        if not known:   # as clients of gRPC read the settings
            return self.values(model)
        current_request().change = ", ".join(f"{name}={value}" for name, value in known.items())
        with self._lock:
            own = self._models.get(model, {}) if model else self._server
            changed = {name: value for name, value in {**own, **known}.items() if value is not None}
            if model:
                self._set(self._server, {**self._models, model: changed}, known=known, at=model)
            else:
                self._set(changed, self._models, known=known, at="")
        return self.values(model)

    def sample(self, model: str) -> Trace | None:
        """Return the trace of a new request to a model; None: it is not traced."""
        if not self.enabled:
            return None
        with self._lock:
            return (self._samplers.get(model) or self._samplers[""]).next()

    def close(self) -> None:
        """Write all traces that have ended; blocks."""
        if self._file is not None:
            self._file.close()

    def _set(
        self,
        server: dict[str, Value],
        models: Mapping[str, dict[str, Value]],
        *,
        known: Container[str],
        at: str,
    ) -> None:
        """Apply settings, of which those in `known` have just changed for a model; "": for the server.

        The counts of requests restart; remaining counts of traces are kept.
        """
        owns = {"": server, **{name: own for name, own in models.items() if own}}
        samplers = dict.fromkeys(owns, self._samplers[""]) | self._samplers
        for name, own in owns.items():
            if name == at or not at:
                values = {**self._start, **server, **own}
                if "trace_count" not in known or (name != at and "trace_count" in own):
                    values["trace_count"] = str(samplers[name].count)
                samplers[name] = self._checked_sampler(values)
        self._server = server
        self._models = {name: own for name, own in owns.items() if name}
        self._samplers = {name: samplers[name] for name in owns}
        self.enabled = any(sampler.traces for sampler in self._samplers.values())

    def _checked_sampler(self, values: Mapping[str, Value]) -> _Sampler:
        if values["trace_level"] != ["OFF"]:
            if values["trace_rate"] == "0":
                raise InferenceError(f"{_INVALID}sample rate must be non-zero")
            if self._file is None:
                raise InferenceError(
                    f"{_INVALID}trace file name is not given",
                    remedy="start the server with --trace-config triton,file=PATH",
                )
        return _Sampler(values, self._file)


class _Sampler:
    """Samples the requests to trace, by some settings. Safe from any thread."""

    def __init__(self, values: Mapping[str, Value], file: TraceFile | None) -> None:
        self.count = int(str(values["trace_count"]))    # remaining; -1: unlimited
        self._has_count = self.count > 0
        self.traces = values["trace_level"] != ["OFF"]
        self._levels = values["trace_level"]
        self._rate = int(str(values["trace_rate"]))
        # Traces per numbered file; 0: all in one file.
        self._num_per_file = int(str(values["log_frequency"])) or max(self.count, 0)
        self._file = file
        self._num_requests = 0
        self._num_in_file = 0
        self._path: Path | None = None
        self._lock = threading.Lock()

    def next(self) -> Trace | None:
        """Count a request, and return its trace if it is sampled."""
        with self._lock:
            if not self.traces or not self.count:
                return None
            self._num_requests += 1
            if self._num_requests % self._rate:
                return None
            self.count -= self._has_count
        return Trace(
            has_timestamps="TIMESTAMPS" in self._levels,
            has_tensors="TENSORS" in self._levels,
            on_end=self._write,
        )

    def _write(self, trace: Trace) -> None:
        assert self._file is not None
        with self._lock:
            if trace.is_empty:  # a rejected request does not count
                self.count += self._has_count
                return
            if self._path is None or self._num_in_file == self._num_per_file > 0:
                self._path = self._file.numbered() if self._num_per_file else self._file.path
                self._num_in_file = 0
            self._num_in_file += 1
            self._file.put(trace, self._path)


def _checked(name: str, value: Value | None) -> Value | None:
    if value is None:
        return None
    if name == "trace_level":
        return _level([value] if isinstance(value, str) else value)
    assert isinstance(value, str)
    return _number(name, value)


def _level(levels: Sequence[str]) -> Value:
    if "OFF" in levels:
        if len(levels) > 1:
            raise InferenceError("Expect only one trace level 'OFF' is specified")
        return ["OFF"]
    return [level for level in _LEVELS if level in levels]  # unknown levels are ignored, as in Triton


def _number(name: str, text: str) -> str:
    number = leading_number(text)
    if number is None:
        raise InferenceError(f"Unable to parse '{name}', got: {text}")
    if name == "trace_count" and number < -1:
        raise InferenceError(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{text}")
    if not -1 <= number <= _MAX or (number < 0 and name != "trace_count"):
        raise InferenceError(f"Unable to parse '{name}', value is out of range [ 0, {_MAX} ], got: {text}")
    return str(number)


def read_trace_config(words: Sequence[str]) -> dict[str, Value]:
    """Parse the values of `--trace-config`: SETTING=VALUE, or MODE,SETTING=VALUE.

    The last one of a setting counts. Levels are combined, unless one of them is OFF.

    Raises:
        GenserveError: an unknown setting, mode or value; the remedy lists the known ones.
    """
    given: dict[str, Value] = {}
    levels: list[str] = []
    for word in words:
        name, is_given, value = word.partition("=")
        if name == "mode" and value.lower() == "triton":
            continue
        if name.startswith("opentelemetry,") or name == "mode":
            raise _invalid_word(
                word,
                "traces are only written to files: the only mode is triton; --otlp-traces-endpoint sends "
                "OpenTelemetry spans of requests for text",
            )
        if name not in _FLAGS or not is_given or not value:
            raise _invalid_word(word, "use one of " + ", ".join(f"{flag}=" for flag in _FLAGS))
        if name == "level":
            levels.append(_LEVEL_WORDS.get(value.lower(), ""))
            if not levels[-1]:
                raise _invalid_word(word, "use one of the levels OFF, TIMESTAMPS, TENSORS")
        elif name == "triton,file":
            given["trace_file"] = value
        elif value.removeprefix("-").isdecimal():
            given[_FLAGS[name]] = _number(_FLAGS[name], value)
        else:
            raise _invalid_word(word, "use an integer")
    if levels:
        given["trace_level"] = ["OFF"] if "OFF" in levels else _level(levels)
    return given


def _invalid_word(word: str, remedy: str) -> GenserveError:
    return GenserveError(f"--trace-config {word} is not a valid setting or value", remedy=remedy)
