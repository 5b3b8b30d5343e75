"""System One: `/v1/systemone`, typed questions about a state, as TypeSafe, llama.cpp and vLLM write them.

The questions are one batch for the engine, which computes their state once: a prompt waits for blocks that
another one is about to compute.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from genserve.completion import TopTokens
from genserve.engine.delta_streams import opened
from genserve.engine.generation_request import AnswerRecord, GenerationRequest
from genserve.engine.input_queue import Reservation
from genserve.errors import Closed, InvalidRequest, require
from genserve.prompt import inside
from genserve.request_context import current_request
from genserve.sampling.sampling_params import SamplingParams
from genserve.server.access.access_control import INFERENCE
from genserve.server.dialects.generation_handler import AnswerResponse, answer_when_loaded
from genserve.server.error_formats import OPENAI_ERRORS, renamed
from genserve.server.http.request_body import Body, TolerantBody
from genserve.server.http.sse_response import while_connected
from genserve.server.route import Router, rules
from genserve.server.services import Services, SharedServices
from genserve.textmodel.decisions import (
    Probabilities,
    Question,
    Read,
    confidence_of_choice,
    confidence_of_score,
    prepare_read,
    probabilities,
    read_question,
)
from genserve.textmodel.text_model import TextModel

router = Router(tag="System One", errors=OPENAI_ERRORS)

MAX_QUESTIONS = 64  # of one request: vLLM's limit
_MAX_SHOWN = 64  # characters of a question's name, which the client chose
_NOT_SUPPORTED = {
    "assets": "send text: text models read no images",
    "images": "send text: text models read no images",
    "decision_template": "write the question in `instructions` and `criteria`",
    "seed": "leave it out: the labels of options are in their order",
}


class QuestionBody(Body):
    """One question."""

    type: Literal["choice", "noul", "score"] = Field(
        description="choice: which of some options; noul: yes or no; score: a level of an ordered scale."
    )
    instructions: Any = Field(default=None, description="The question: a text or JSON.")
    criteria: Any = Field(
        default=None,
        description="Of a choice, an object with a description or null for each option; of a score, the list "
        "of its levels from 0 on; of a noul, an object that may describe `true` and `false`.",
    )


class SystemOneBody(TolerantBody):
    """Body of `POST /v1/systemone`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "state": "I was charged twice. Please help.",
                    "questions": {
                        "billing": {"type": "noul", "instructions": "Is this about billing?"},
                        "urgency": {
                            "type": "score",
                            "instructions": "How urgent is it?",
                            "criteria": ["It can wait", "This week", "Today"],
                        },
                    },
                }
            ]
        }
    )

    model: str | None = Field(
        default=None, description="The name of a model; not needed if there is only one."
    )
    state: Any = Field(description="What the questions are about: a text or JSON.")
    questions: dict[str, QuestionBody] = Field(
        min_length=1, max_length=MAX_QUESTIONS, description="The questions by names of your choice."
    )
    instructions: str | None = Field(default=None, description="vLLM's: the system message.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the model's chat template."
    )
    cache_salt: str | None = Field(
        default=None, description="Cached prefixes are shared only by requests with the same salt."
    )
    priority: int | None = Field(
        default=None,
        description="Of waiting requests, those with the lowest number go first.",
        json_schema_extra={"default": 0},
    )

    def read(self) -> tuple[dict[str, Question], SamplingParams]:
        """Return the questions by name, and the parameters; raises InvalidRequest."""
        self.reject(_NOT_SUPPORTED)
        require(isinstance(self.state, str | dict | list), "state", "must be a text, an object or a list")
        questions = {}
        for name, question in self.questions.items():
            with inside(f"questions.{name[:_MAX_SHOWN]}"):
                questions[name] = read_question(
                    question.type, instructions=question.instructions, criteria=question.criteria
                )
        return questions, SamplingParams(cache_salt=self.cache_salt, priority=self.priority or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The questions of a request, with what the model says to them."""

    reads: Mapping[str, Read]
    logprobs: Mapping[str, Probabilities]
    temperatures: Mapping[str, float]  # that were fitted, by type of question
    records: Sequence[AnswerRecord]

    @property
    def num_cached_tokens(self) -> int:
        """The tokens of all prompts that were in the prefix cache."""
        firsts = {read.requests[()] for read in self.reads.values()}
        return sum(record.num_cached_tokens for record in self.records if record.request in firsts)


@router.post("/v1/systemone")
@router.post("/systemone", include_in_schema=False)
@rules(INFERENCE)
async def systemone(body: SystemOneBody, services: SharedServices, request: Request) -> Response:
    """Answer questions about a state by the probabilities of their options; no text is generated."""
    questions, params = body.read()

    async def answer(model: TextModel) -> Response:
        reading = _read(services, body, questions, params)
        reads = await while_connected(reading, request.receive)
        return AnswerResponse(_document(model, reads, body))

    return await answer_when_loaded(services, body.model, answer, streams=None)


async def _read(
    services: Services, body: SystemOneBody, questions: Mapping[str, Question], params: SamplingParams
) -> Reads:
    """Return what the model says to the questions.

    Raises:
        InvalidRequest: a question does not fit the model; `field` names it.
        GenserveError: see `generation_handler.submit`.
    """
    services.check_running()
    model = services.repository.text_model(body.model)
    context = current_request()
    context.model, context.operation = model.name, "chat"
    try:
        with model.engine.reserve(1, priority=params.priority, share=context.key) as reservation:
            preparing = partial(_prepared, model, body, questions, params, reservation=reservation)
            reads, temperatures = await asyncio.wrap_future(model.run_soon(preparing, compiles=False))
            requests = [request for read in reads.values() for request in read.requests.values()]
            size = model.max_num_seqs
            answers, records = await _next_logprobs(services, model, requests[:size], reservation=reservation)
        for begin in range(size, len(requests), size):
            more, more_records = await _next_logprobs(services, model, requests[begin : begin + size])
            answers |= more
            records = [*records, *more_records]
    except Closed:
        if services.repository.text_model(body.model) is model:
            raise
        return await _read(services, body, questions, params)  # another model has taken its place meanwhile
    return Reads(
        reads=reads,
        logprobs={name: read.logprobs(answers) for name, read in reads.items()},
        temperatures=temperatures,
        records=records,
    )


def _prepared(
    model: TextModel,
    body: SystemOneBody,
    questions: Mapping[str, Question],
    params: SamplingParams,
    *,
    reservation: Reservation,
) -> tuple[dict[str, Read], Mapping[str, float]]:
    """Return the requests for each question, and the model's temperatures, on a thread of the model."""
    reservation.check()
    try:
        reads = {
            name: prepare_read(
                model,
                body.state,
                question,
                instructions=body.instructions,
                params=params,
                template_kwargs=body.chat_template_kwargs,
            )
            for name, question in questions.items()
        }
    except InvalidRequest as error:
        raise renamed(error, {"messages": "state", "prompt": "state"}) from None
    return reads, model.temperatures


async def _next_logprobs(
    services: Services,
    model: TextModel,
    requests: Sequence[GenerationRequest],
    *,
    reservation: Reservation | None = None,
) -> tuple[dict[GenerationRequest, TopTokens], Sequence[AnswerRecord]]:
    """Return the log-probabilities of the next tokens that requests ask for, and the record of each."""
    opening = partial(services.output_sink().open, model.engine, *requests, reservation=reservation)
    stream = await opened(model.run_soon(opening, compiles=False))
    context = current_request()
    context.answers = [*context.answers, *stream.answers]
    async with stream:
        deltas = [delta for some in [deltas async for deltas in stream] for delta in some]
    found = {requests[delta.choice]: delta.top_logprobs[0] for delta in deltas if delta.top_logprobs}
    return found, stream.answers


def _document(model: TextModel, reads: Reads, body: SystemOneBody) -> dict[str, Any]:
    return {
        "id": f"decision-{uuid.uuid4().hex}",
        "object": "structured_decision",
        "created": int(time.time()),
        "model": model.name,
        "answers": {
            name: _answer(
                read.question,
                reads.logprobs[name],
                criteria=body.questions[name].criteria,
                temperature=reads.temperatures.get(read.question.type),
            )
            for name, read in reads.reads.items()
        },
        "usage": {
            "input_tokens": sum(read.num_prompt_tokens for read in reads.reads.values()),
            "output_tokens": len(reads.reads),
            "input_tokens_details": {"cached_tokens": reads.num_cached_tokens},
        },
        # How likely the model is to answer with an option at all, in vLLM's words.
        "diagnostics": {
            name: {"label_mass": min(1.0, float(np.exp(logprobs).sum()))}
            for name, logprobs in reads.logprobs.items()
        },
    }


def _answer(
    question: Question, logprobs: Probabilities, *, criteria: Any, temperature: float | None
) -> dict[str, Any]:
    used = 1.0 if temperature is None else temperature
    found = probabilities(logprobs, temperature=used)
    by_name = {option.name: float(one) for option, one in zip(question.options, found, strict=True)}
    own: dict[str, Any]
    match question.type:
        case "noul":
            own = {"noul": by_name["true"]}
        case "choice":
            own = {
                "choice": question.options[int(found.argmax())].name,
                "probabilities": by_name,
                "confidence": confidence_of_choice(found),
            }
        case "score":
            own = {
                "score": float(found @ np.arange(len(found))),
                "legend": dict(zip(by_name, criteria, strict=True)),
                "probabilities": by_name,
                "confidence": confidence_of_score(found),
            }
    return {"type": question.type, **own, "calibrated": temperature is not None, "temperature": used}
