"""Both clients against the real server: their answers equal those of `LLM` in process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.client import Client
from genserve.completion import Completion
from genserve.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from genserve.llm import LLM
from genserve.prompt import Chat, Message, read_messages
from genserve.sampling.sampling_options import SamplingOptions
from tests.client.either_client import BlockingClient

OPTIONS = [
    SamplingOptions(max_tokens=12, ignore_eos=True),
    SamplingOptions(max_tokens=12, ignore_eos=True, temperature=1.0, top_k=40, top_p=0.9, seed=7),
    SamplingOptions(
        max_tokens=12,
        ignore_eos=True,
        temperature=1.2,
        seed=8,
        min_p=0.001,
        typical_p=0.95,
        epsilon_cutoff=1e-4,
        eta_cutoff=1e-4,
        top_n_sigma=3.0,
    ),
    SamplingOptions(
        max_tokens=12,
        ignore_eos=True,
        temperature=1.1,
        seed=9,
        top_h=0.9,
        min_p=0.001,
        dynatemp_range=0.4,
        dynatemp_exponent=2.0,
        xtc_probability=0.5,
        xtc_threshold=0.01,
        samplers=["top_h", "min_p", "temperature", "xtc"],
        frequency_penalty=0.5,
        penalty_window=8,
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=1,
        dry_penalty_last_n=50,
        dry_sequence_breakers=["\n", "er"],
    ),
    SamplingOptions(
        max_tokens=12,
        ignore_eos=True,
        temperature=1.0,
        seed=10,
        mirostat_mode=2,
        mirostat_tau=3.0,
        mirostat_eta=0.2,
        dry_multiplier=0.8,
    ),
    SamplingOptions(max_tokens=12, stop_token_ids=list(range(3, 160))),
    SamplingOptions(
        max_tokens=12,
        ignore_eos=True,
        logit_bias={270: 100.0},
        repetition_detection={"max_pattern_size": 3, "min_count": 4},
        max_time_ms=600_000,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        stop_regex=["[^ -~]{9}"],
        include_stop_str_in_output=True,
    ),
    SamplingOptions(
        max_tokens=12,
        min_tokens=12,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        no_repeat_ngram_size=2,
        logit_bias={7: 50.0},
        suppress_tokens=[8],
        bad_words=["e"],
        allowed_token_ids=list(range(200)),
    ),
]


@pytest.fixture(scope="module")
def llm(tiny_repository: Path) -> Iterator[LLM]:
    with LLM(model_repository=tiny_repository) as llm:
        yield llm


CLIENTS = {"sync": Client, "async": BlockingClient}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, tiny_server: Any) -> Iterator[Any]:
    with CLIENTS[request.param](tiny_server.url) as client:
        yield client


def of_each_client(all_options: Sequence[SamplingOptions]) -> pytest.MarkDecorator:
    """Both clients with all options, which they write alike: the second has only the last ones by default."""
    *others, last = all_options
    cases = [("sync", options) for options in all_options] + [("async", last)]
    extended = [pytest.param("async", options, marks=pytest.mark.extended) for options in others]
    return pytest.mark.parametrize(("client", "options"), [*cases, *extended], indirect=["client"])


CALLS = {
    "generate": lambda model, options: model.generate("Tea is", **options),
    "stream": lambda model, options: model.stream("Tea is", **options).final(),
    "chat": lambda model, options: model.chat(CHAT, **options),
    "chat_stream": lambda model, options: model.chat_stream(CHAT, **options).final(),
}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Any:
    return CALLS[request.param]


@of_each_client(OPTIONS)
def test_an_answer_is_the_same_as_in_process(
    client: Any, llm: LLM, call: Any, options: SamplingOptions
) -> None:
    assert call(client, options) == call(llm, options)


@pytest.mark.parametrize("top_logprobs", [0, 3])
def test_log_probabilities_are_the_same_as_in_process(
    client: Any, llm: LLM, call: Any, top_logprobs: int
) -> None:
    options = SamplingOptions(max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=top_logprobs)
    expected = levels(call(llm, options), logprobs=True)
    assert len(expected) == 4 * (1 + top_logprobs)
    assert levels(call(client, options), logprobs=True) == pytest.approx(expected, abs=1e-4)


def test_tokens_are_the_same_as_in_process(client: Any, llm: LLM) -> None:
    begun = (*read_messages(CHAT), Message(role="assistant", content="Hel"))
    chat = Chat(messages=begun, continue_final_message=True)
    for prompt in ("größer<|im_end|>", CHAT, chat):
        assert client.tokenize(prompt) == llm.tokenize(prompt)
    ids = llm.tokenize("größer<|im_end|>", add_special_tokens=False)
    assert client.tokenize("größer<|im_end|>", add_special_tokens=False) == ids
    assert client.detokenize(ids) == llm.detokenize(ids) == "größer<|im_end|>"
    assert client.detokenize(ids, skip_special_tokens=True) == "größer"
    assert llm.detokenize(ids, skip_special_tokens=True) == "größer"
    assert client.model_cards()["tiny"].max_length == llm.max_length
    for model in (client, llm):
        with pytest.raises(InvalidRequest, match="100000") as caught:
            model.detokenize([0, 100_000])
        assert caught.value.field == "tokens[1]"


def test_errors_are_the_same_as_in_process(client: Any) -> None:
    with pytest.raises(ContextLengthExceeded):
        client.stream("Tea is " * 1000)
    with pytest.raises(ContextLengthExceeded) as raised:
        client.chat("Tea is " * 1000)
    assert "resulted in" in raised.value.message
    assert raised.value.remedy.lower() not in raised.value.message.lower()
    with pytest.raises(ModelNotFound):
        client.generate("Tea is", model="nobody")


def test_the_models_are_those_of_the_repository(client: Any, llm: LLM) -> None:
    assert client.models() == [llm.model]


@pytest.mark.parametrize("options", [{"prompt_logprobs": 0}, {"logprobs": True, "logprob_token_ids": [3]}])
def test_an_option_without_a_field_in_tgis_dialect_is_rejected(client: Any, options: SamplingOptions) -> None:
    for ask in (client.generate, client.stream):
        with pytest.raises(InvalidRequest) as rejected:
            ask("Tea is", **options)
        assert rejected.value.field in options


def test_logprobs_of_a_chat_are_the_same_as_in_process(client: Any, llm: LLM) -> None:
    options = SamplingOptions(max_tokens=2, logprobs=True, logprob_token_ids=[9, 3], prompt_logprobs=1)
    expected = levels(llm.chat("Hi", **options), logprobs=True)
    assert len(expected) > 10
    assert levels(client.chat("Hi", **options), logprobs=True) == pytest.approx(expected, abs=1e-4)


@of_each_client(
    [
        *OPTIONS,
        SamplingOptions(max_tokens=2, logprobs=True, logprob_token_ids=[9, 3], logprobs_mode="processed"),
        SamplingOptions(max_tokens=3, prompt_logprobs=0, temperature=1.0, best_of=4, seed=5),
        SamplingOptions(max_tokens=3, use_beam_search=True, beam_width=4),
        SamplingOptions(logprobs=True, top_logprobs=3, prompt_logprobs=2),
    ]
)
def test_completions_are_the_same_as_in_process(client: Any, llm: LLM, options: SamplingOptions) -> None:
    ids = [llm.complete(text, max_tokens=1)[0].prompt_token_ids for text in ("Tea is", "The river had")]
    wants_logprobs = options.get("logprobs", False)
    for prompts in ("Tea is", ["Tea is", "The river had"], ids):
        expected = llm.complete(prompts, n=2, **options)
        found = client.complete(prompts, n=2, **options)
        for one, same in zip(found, expected, strict=True):
            assert words(one) == words(same)
            logprobs = levels(same, logprobs=wants_logprobs)
            assert levels(one, logprobs=wants_logprobs) == pytest.approx(logprobs, abs=1e-4)
        assert len(found) == 2 * (1 if isinstance(prompts, str) else 2)
        assert {one.prompt_token_ids for one in found} == set(ids[: len(found) // 2])


def words(completion: Completion) -> Completion:
    """Return a completion without its log-probabilities, whose last digits depend on the batch."""
    return replace(completion, logprobs=(), top_logprobs=(), prompt_logprobs=())


def levels(completion: Completion, *, logprobs: bool) -> dict[tuple[Any, ...], float]:
    """Return the numbers of a completion; with best_of, the reply has log-probabilities unasked."""
    own = enumerate(completion.logprobs if logprobs else ())
    scores = completion.prompt_logprobs
    tops = [*completion.top_logprobs, *(score.top for score in scores)]
    return {
        **{("answer", place): level for place, level in own},
        **{("prompt", place): score.logprob for place, score in enumerate(scores)},
        **{("top", place, token_id): level for place, top in enumerate(tops) for token_id, level in top},
    }


@pytest.mark.parametrize("prompts", [[], ["Tea", [3]], [["Tea"]], [True]])
def test_an_invalid_prompt_is_rejected_before_it_is_sent(client: Any, llm: LLM, prompts: Any) -> None:
    for complete in (client.complete, llm.complete):
        with pytest.raises(InvalidRequest) as rejected:
            complete(prompts)
        assert rejected.value.field == "prompt"


def test_prompt_logprobs_are_the_same_in_process_and_over_http(llm: LLM, tiny_server: Any) -> None:
    scores = llm.generate("Tea is", max_tokens=1, prompt_logprobs=1).prompt_logprobs
    body = {"prompt": "Tea is", "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = httpx2.post(f"{tiny_server.url}/v1/completions", json=body).json()
    expected = reply["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-5)
    assert all(len(score.top) == 1 for score in scores)
