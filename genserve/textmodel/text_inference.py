"""Text inference: answers requests with named tensors, of KServe and BLS, by a text model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from genserve.completion import DEADLINE, Delta, FinishReason
from genserve.config.model_config import ModelConfig
from genserve.engine.generation_request import AnswerRecord, GenerationOutput, GenerationRequest
from genserve.engine.input_queue import Reservation
from genserve.engine.text_engine import TextEngine
from genserve.errors import Closed, GenserveError, InferenceError, InvalidRequest, Status
from genserve.inference import Inference, InferenceResponse, Parameter
from genserve.inference_statistics import ModelStatistics
from genserve.request_context import current_request
from genserve.sampling.sampling_params import (
    PARAMETERS,
    TRITON_TENSORS,
    SamplingParams,
    sampling_params,
    without_rejected_methods,
)
from genserve.tensor import Tensor, decode_strings, string_tensor
from genserve.textmodel.text_model import TextModel

# The sampling parameters that Triton's backends for language models have tensors for.
_PARAMETERS = {tensor: row.name for tensor, row in TRITON_TENSORS.items() if row.item is None}
# The kinds of structured outputs of Triton's backends, and the fields of `structured_outputs`.
_GUIDES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
_WORDS = {tensor: row.name for tensor, row in TRITON_TENSORS.items() if row.item is str}
_TEXTS = _WORDS | dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), "structured_outputs")
# The inputs and the output of a text model; its ensemble may rename them.
INPUTS = frozenset({"text_input", "stream", *_PARAMETERS, *_TEXTS})
OUTPUT = "text_output"
# Request parameters whose values are JSON.
_PLUGINS = ("logits_processors", "stop_rules", "output_parser")
# All request parameters that are read; `priority` is Triton's own, `lora_name` that of its backend for vLLM.
_READ = frozenset({*_PLUGINS, "cache_salt", "lora_name", "priority"})
_SAME_VALUES = "send rows with different values as separate requests"


class TextInference:
    """Answers inferences by a text model; a `ModelRuntime`.

    With the input `stream` each step is a response; otherwise the whole text is one.

    Attributes:
        text_model: the loaded model, which `close` closes.
    """

    def __init__(self, text_model: TextModel, config: ModelConfig, *, statistics: ModelStatistics) -> None:
        """Answer by a text model.

        Args:
            text_model: a loaded model.
            config: the ensemble's config; its steps map the names of its tensors to the stages' tensors.
            statistics: counts the executions.
        """
        self.text_model = text_model
        self._names = _stage_names(config)
        self._output = next((name for name, known in self._names.items() if known == OUTPUT), OUTPUT)
        self._statistics = statistics

    @property
    def ready(self) -> bool:
        """Whether the text model's engine runs."""
        return self.text_model.engine.ready

    @property
    def num_waiting(self) -> int:
        """Inferences that are being prepared, or wait to be scheduled; an adapter's count for its base."""
        return 0 if self.text_model.base is not None else self.text_model.num_waiting

    def submit(self, inference: Inference) -> None:
        """Prepare the request on a thread of the model, which submits it to the engine.

        Raises:
            Overloaded: see `TextEngine.reserve`.
            Closed: after `close`.
        """
        inference.inputs = {self._names.get(name, name): tensor for name, tensor in inference.inputs.items()}
        current_request().operation = "text_completion"
        reservation = self.text_model.engine.reserve(inference.batch_size, share=inference.share)
        inference.when_cancelled(reservation.release)
        try:
            self.text_model.run_soon(
                partial(self._prepare, inference, reservation),
                compiles="guided_decoding_guide" in inference.inputs,
            )
        except Closed:
            reservation.release()
            raise

    def close(self) -> None:
        """End all requests and the engine's thread."""
        self.text_model.close()

    def _prepare(self, inference: Inference, reservation: Reservation) -> None:
        try:
            with reservation:
                if inference.cancelled or inference.ended:
                    inference.fail_cancelled()
                else:
                    self._submit(inference, reservation)
        except Exception as error:
            inference.fail(InferenceError.of(error))

    def _submit(self, inference: Inference, reservation: Reservation) -> None:
        reservation.check()
        params = _params(inference.inputs, inference.request.parameters)
        if timeout_us := inference.request.timeout_us or _timeout_us(inference.request.parameters):
            params = replace(params, max_time_ms=math.ceil(timeout_us / 1000))
        prompts = decode_strings(inference.inputs["text_input"])
        streaming = _scalar(inference.inputs, "stream", default=False)
        if streaming and len(prompts) > 1:
            raise InvalidRequest("a streamed request has one text_input", field="stream")
        prepare = partial(
            self.text_model.prepare,
            params=params,
            arrived_s=reservation.arrived_s,
            adapter=_adapter(inference.request.parameters),
        )
        requests = [replace(prepare(prompt), share=inference.share) for prompt in prompts]
        answer = _Answer(
            inference, requests, engine=self.text_model.engine, output=self._output, streaming=streaming
        )
        inference.when_ended(self._statistics.executed_alone)
        answer.submit(reservation)
        context = current_request()
        context.answers, context.streams = answer.records, bool(streaming)
        inference.when_cancelled(answer.cancel)


class _Answer:
    """Turns the deltas of one inference into responses; an `OutputSink` of the engine.

    Attributes:
        records: the record of each row of the batch, with what has arrived for it.
    """

    def __init__(
        self,
        inference: Inference,
        requests: Sequence[GenerationRequest],
        *,
        engine: TextEngine,
        output: str,
        streaming: bool,
    ) -> None:
        self._inference = inference
        self._engine = engine
        self._output = output
        self._streaming = streaming
        self._rows = {request: row for row, request in enumerate(requests)}
        self.records = [AnswerRecord(request) for request in requests]
        self._texts = [""] * len(requests)
        self._num_open = len(requests)

    def submit(self, reservation: Reservation) -> None:
        """Submit the requests to the engine, which accepts all of them or none."""
        self._inference.started_ns = self._inference.started_ns or self._inference.submitted_ns
        self._engine.submit(*self._rows, sink=self, reservation=reservation)

    def cancel_requests(self) -> None:
        """Cancel the requests in the engine."""
        for request in self._rows:
            self._engine.cancel(request)

    def cancel(self) -> None:
        """End the inference as cancelled."""
        self.cancel_requests()
        self._inference.fail_cancelled()

    def deliver(self, outputs: Sequence[GenerationOutput]) -> None:
        """See `OutputSink.deliver`."""
        for output in outputs:
            row, content = self._rows[output.request], output.content
            self.records[row].add(output)
            if isinstance(content, GenserveError):
                self.cancel_requests()
                self._inference.fail(content)
            elif content.finish_reason is FinishReason.LENGTH and content.stop_reason == DEADLINE:
                self.cancel_requests()
                self._inference.fail(InferenceError("Request timeout expired", status=Status.UNAVAILABLE))
            else:
                self._add_delta(row, content)

    def _add_delta(self, row: int, delta: Delta) -> None:
        if self._inference.span is not None:
            self._inference.span.record_first_token()
        self._num_open -= delta.finish_reason is not None
        if self._streaming:
            self._send([delta.text], final=not self._num_open)
            return
        self._texts[row] += delta.text
        if not self._num_open:
            self._send(self._texts, final=True)

    def _send(self, answers: Sequence[str], *, final: bool) -> None:
        output = string_tensor(self._output, answers, shape=(len(answers), 1))
        try:
            self._inference.send(InferenceResponse(outputs=(output,)), final=final)
        except Closed:
            return  # cancelled during the step


def _stage_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of the tensors at the stages, by the names that the ensemble gives them."""
    inputs = [item for step in config.ensemble_steps for item in step.input_map.items()]
    inputs.sort(key=lambda item: item[0] == "text_input")   # the tokenizer's, where a decoder has it too
    outputs = [item for step in config.ensemble_steps for item in step.output_map.items()]
    return {tensor: name for name, tensor in (*inputs, *outputs)}


def _params(inputs: Mapping[str, Tensor], parameters: Mapping[str, Parameter]) -> SamplingParams:
    options = {
        option: _scalar(inputs, name, default=None) for name, option in _PARAMETERS.items() if name in inputs
    }
    for name, option in _WORDS.items():
        if name in inputs:
            options[option] = [text for text in decode_strings(inputs[name]) if text]
    options |= {name: _parsed(name, parameters[name]) for name in _PLUGINS if name in parameters}
    without_rejected_methods(parameters)
    _reject_unread(parameters)
    if "cache_salt" in parameters:
        options["cache_salt"] = parameters["cache_salt"]
    options["structured_outputs"] = _structured_outputs(inputs)
    width = options.pop("beam_width", None) or 1    # by which Triton's clients ask for no beam search
    if width != 1:
        options |= {"use_beam_search": True, "beam_width": width}
    # Greedy by default, whatever the model recommends.
    return sampling_params({**options, "temperature": options.get("temperature") or 0.0})


def _timeout_us(parameters: Mapping[str, Parameter]) -> int:
    """Return the timeout that the generate extension passes on like any other parameter; 0: there is none."""
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise InvalidRequest("timeout must be a number of microseconds", field="timeout")
    return timeout


def _adapter(parameters: Mapping[str, Parameter]) -> str | None:
    """Return the adapter that a request names, as requests to Triton's backend for vLLM do; None: none."""
    name = parameters.get("lora_name", "")
    if not isinstance(name, str):
        raise InvalidRequest("lora_name must be the name of an adapter", field="lora_name")
    return name or None


def _reject_unread(parameters: Mapping[str, Parameter]) -> None:
    """Reject request parameters that only tensors may set, unless neutral; Triton ignores unknown ones."""
    names = {name: name for name in PARAMETERS} | _PARAMETERS | _TEXTS
    for name in names.keys() & parameters.keys() - _READ:
        nothing = ("", 1) if name == "beam_width" else ("", PARAMETERS[names[name]].default)
        if parameters[name] not in nothing:
            raise InvalidRequest(
                f"{name} cannot be set by a request parameter",
                field=name,
                remedy="send it as an input tensor, or use OpenAI's routes if the ensemble has no such input",
            )


def _structured_outputs(inputs: Mapping[str, Tensor]) -> Mapping[str, Any] | None:
    """Return the structured outputs that the tensors ask for; None: none. Empty texts are ignored."""
    kind, guide = (_text(inputs, name) for name in ("guided_decoding_guide_type", "guided_decoding_guide"))
    if not kind and not guide:
        return None
    if kind not in _GUIDES:
        known = ", ".join(_GUIDES)
        name = "guided_decoding_guide_type"
        raise InvalidRequest(f"{name} must be one of {known}", field=name)
    constraint = _GUIDES[kind]
    if bool(guide) == (constraint == "json_object"):
        name = "guided_decoding_guide"
        problem = "cannot be used with" if guide else "is required for"
        raise InvalidRequest(f"{name} {problem} {kind}", field=name)
    return {constraint: True if constraint == "json_object" else guide}


def _text(inputs: Mapping[str, Tensor], name: str) -> str:
    """Return the text of an input, the same for all rows of the batch; empty: there is no such input."""
    distinct = set(decode_strings(inputs[name])) if name in inputs else {""}
    if len(distinct) > 1:
        raise InvalidRequest(
            f"the rows of one request have different values of {name}", field=name, remedy=_SAME_VALUES
        )
    return distinct.pop() if distinct else ""


def _parsed(name: str, text: Parameter) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else "")
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} must be a string that contains JSON", field=name) from None


def _scalar(inputs: Mapping[str, Tensor], name: str, *, default: Any) -> Any:
    """Return the value of an input, the same for all rows of the batch."""
    tensor = inputs.get(name)
    if tensor is None or not tensor.array.size:
        return default
    values = tensor.array.reshape(-1)
    if (values != values[0]).any():
        raise InvalidRequest(
            f"the rows of one request have different values of {name}", field=name, remedy=_SAME_VALUES
        )
    return values[0].item()
