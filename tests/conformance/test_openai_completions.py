"""openai-python's older completions against a running server."""

from __future__ import annotations

import math

import openai
import pytest
import torch

from genserve import LLM
from tests.support.transformers_reference import reference_model

ON = {"ignore_eos": True}  # a random model ends anywhere
OPTIONS = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": ON}
TEXTS = ["hello there", "the quick brown fox", "hello again"]


@pytest.fixture(scope="module")
def answers(tiny_repository):
    """The answers of the same model in this process."""
    with LLM(model_repository=tiny_repository) as llm:
        return {text: llm.generate(text, max_tokens=12, logprobs=True, ignore_eos=True) for text in TEXTS}


def token_ids(tiny_server, text: str) -> list[int]:
    return tiny_server.model.tokenizer.encode(text)


def wait_until_idle(tiny_server) -> None:
    while tiny_server.model.engine.num_accepted:
        pass


def test_a_text_is_completed_with_sixteen_tokens_if_nothing_is_said(client, answers):
    answer = client.completions.create(model="tiny", prompt=TEXTS[0], temperature=0, extra_body=ON)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text.startswith(answers[TEXTS[0]].text)


def test_all_four_kinds_of_prompts_have_the_same_answers(client, tiny_server, answers):
    ids = [token_ids(tiny_server, text) for text in TEXTS]
    expected = [answers[text].text for text in TEXTS]

    def texts(prompt):
        choices = client.completions.create(**OPTIONS, prompt=prompt).choices
        assert [choice.index for choice in choices] == list(range(len(choices)))
        return [choice.text for choice in choices]

    assert texts(TEXTS) == expected
    assert texts(ids) == expected
    assert texts(TEXTS[0]) == expected[:1]
    assert texts(ids[0]) == expected[:1]


def test_the_usage_counts_a_prompt_once_and_all_that_was_answered(client, tiny_server):
    lengths = [len(token_ids(tiny_server, text)) for text in TEXTS]
    usage = client.completions.create(**OPTIONS, prompt=TEXTS, n=2).usage
    assert usage.prompt_tokens == sum(lengths)
    assert usage.completion_tokens == 2 * 3 * 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_choices_of_one_seed_differ_and_come_again(client):
    options = OPTIONS | {"temperature": 1.5, "seed": 7}
    both = client.completions.create(**options, prompt=TEXTS[:2], n=3).choices
    assert [choice.index for choice in both] == list(range(6))
    again = client.completions.create(**options, prompt=TEXTS[:2], n=3).choices
    assert [choice.text for choice in both] == [choice.text for choice in again]
    assert len({choice.text for choice in both}) == 6
    # Choice i is what its own seed gives alone.
    alone = client.completions.create(**(options | {"seed": 9}), prompt=TEXTS[1])
    assert alone.choices[0].text == both[5].text


def test_choices_share_the_cached_prompt(client, tiny_server):
    prompt = "a prompt that nobody sent before " * 3
    before = tiny_server.model.engine.num_steps
    wait_until_idle(tiny_server)
    answer = client.completions.create(**OPTIONS, prompt=prompt, n=4)
    assert len({choice.text for choice in answer.choices}) == 1
    # Side by side: far fewer steps than one answer after the other takes.
    assert tiny_server.model.engine.num_steps - before < 2 * 12


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_joins_to_the_whole_choice_by_choice(client, tiny_server, echo):
    options = OPTIONS | {"prompt": [token_ids(tiny_server, t) for t in TEXTS], "n": 2, "echo": echo}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    texts = [""] * 6
    ends = []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == list(range(6))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.object, chunk.model) for chunk in chunks}) == 1


async def test_the_asynchronous_client_streams(tiny_server, answers):
    async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:
        stream = await client.completions.create(**OPTIONS, prompt=TEXTS[0], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == answers[TEXTS[0]].text


def test_an_echo_begins_with_the_prompt(client, tiny_server, answers):
    expected = TEXTS[0] + answers[TEXTS[0]].text
    assert client.completions.create(**OPTIONS, prompt=TEXTS[0], echo=True).choices[0].text == expected
    ids = token_ids(tiny_server, TEXTS[0])
    assert client.completions.create(**OPTIONS, prompt=ids, echo=True).choices[0].text == expected


def test_logprobs_are_those_of_the_picked_tokens(client, answers):
    expected = answers[TEXTS[0]]
    found = client.completions.create(**OPTIONS, prompt=TEXTS[0], logprobs=0).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx(list(expected.logprobs), abs=1e-5)
    assert "".join(found.logprobs.tokens) == found.text == expected.text
    for token, offset in zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True):
        assert found.text[offset:].startswith(token)
    assert all(math.isfinite(value) for top in found.logprobs.top_logprobs for value in top.values())


def test_the_tokens_of_an_echo_are_those_of_the_text_whatever_it_names(client, tiny_server):
    prompt = f"hello {tiny_server.model.tokenizer.eos_token} there"
    found = client.completions.create(**OPTIONS, prompt=prompt, echo=True, logprobs=0).choices[0]
    assert found.text.startswith(prompt)
    assert "".join(found.logprobs.tokens) == found.text
    for token, offset in zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True):
        assert found.text[offset:].startswith(token)


def test_streamed_logprobs_join_to_those_of_the_whole(client):
    options = OPTIONS | {"prompt": TEXTS[1], "logprobs": 0}
    whole = client.completions.create(**options).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


@pytest.fixture(scope="module")
def log_softmax(tiny_checkpoint):
    """The log-probabilities of transformers' own forward over whole sequences."""
    network = reference_model(tiny_checkpoint)

    def forward(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(network(torch.tensor([token_ids])).logits[0].double(), dim=-1)

    return forward


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_are_scored_as_transformers_scores_them(client, tiny_server, log_softmax, max_tokens):
    prompts = [token_ids(tiny_server, text * 3) for text in TEXTS]
    options = OPTIONS | {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    client.completions.create(**options)  # what is cached of a prompt now has no scores
    answer = client.completions.create(**options)
    assert answer.usage.completion_tokens == 3 * max_tokens
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        found = choice.logprobs
        expected = log_softmax(prompt)
        scores = [expected[i, token_id].item() for i, token_id in enumerate(prompt[1:])]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert found.token_logprobs[1 : len(prompt)] == pytest.approx(scores, abs=1e-3)
        assert len(found.tokens) == len(found.text_offset) == len(prompt) + max_tokens
        assert "".join(found.tokens) == choice.text
        # The harnesses' way to tell whether a greedy answer would have been this one.
        tops = found.top_logprobs[1 : len(prompt)]
        greedy = [found.token_logprobs[i] == max(top.values()) for i, top in enumerate(tops, start=1)]
        best = expected.argmax(dim=-1).tolist()
        assert greedy == [best[i - 1] == prompt[i] for i in range(1, len(prompt))]


def test_the_most_likely_tokens_are_those_of_transformers(client, tiny_server, log_softmax):
    prompt = token_ids(tiny_server, TEXTS[0])
    extra = ON | {"return_token_ids": True}
    options = OPTIONS | {"prompt": prompt, "logprobs": 4, "temperature": 1.5, "seed": 3, "extra_body": extra}
    choice = client.completions.create(**options).choices[0]
    answer = choice.model_extra["token_ids"]
    expected = log_softmax(prompt + answer)[len(prompt) - 1 : -1]
    for row, own, top in zip(expected, answer, choice.logprobs.top_logprobs, strict=True):
        wanted = sorted({own, *row.topk(4).indices.tolist()}, key=lambda token_id: -row[token_id])
        levels = [row[token_id].item() for token_id in wanted]
        assert sorted(top.values(), reverse=True) == pytest.approx(levels, abs=1e-3)


def test_a_streamed_score_is_the_whole_one(client):
    options = OPTIONS | {"prompt": TEXTS[:2], "max_tokens": 3, "echo": True, "logprobs": 2, "n": 2}
    whole = client.completions.create(**options).choices
    found = [[] for _ in whole]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.logprobs.token_logprobs
    assert found == [pytest.approx(choice.logprobs.token_logprobs) for choice in whole]


def test_an_echo_of_the_prompt_alone_has_no_answer(client):
    answer = client.completions.create(**(OPTIONS | {"max_tokens": 0}), prompt=TEXTS[0], echo=True)
    assert answer.choices[0].text == TEXTS[0]
    assert answer.usage.completion_tokens == 0


def test_a_stop_string_ends_its_choice_alone(client, answers):
    stop = answers[TEXTS[0]].text[3:6]
    choices = client.completions.create(**OPTIONS, prompt=TEXTS, stop=stop).choices
    for text, choice in zip(TEXTS, choices, strict=True):
        whole, stopped, _ = answers[text].text.partition(stop)
        assert choice.text == whole
        assert choice.finish_reason == ("stop" if stopped else "length")


def test_extras_have_vllms_names(client, answers):
    expected = answers[TEXTS[0]].token_ids
    extra = ON | {"return_token_ids": True, "stop_token_ids": [expected[4]], "top_k": 3, "cache_salt": "mine"}
    choice = client.completions.create(**(OPTIONS | {"extra_body": extra}), prompt=TEXTS[0]).choices[0]
    assert choice.model_extra["token_ids"] == list(expected[: expected.index(expected[4]) + 1])
    assert choice.finish_reason == "stop"


def test_what_is_forbidden_is_not_picked_and_its_likelihood_is_the_models_own(client, tiny_server, answers):
    best = answers[TEXTS[0]].token_ids[0]
    extra = ON | {"return_token_ids": True}
    options = OPTIONS | {"prompt": TEXTS[0], "max_tokens": 1, "logprobs": 1, "extra_body": extra}
    free = client.completions.create(**options).choices[0]
    biased = client.completions.create(**options, logit_bias={str(best): -100}).choices[0]
    assert free.model_extra["token_ids"] == [best]
    assert biased.model_extra["token_ids"] != [best]
    [top] = biased.logprobs.top_logprobs
    assert max(top.values()) == pytest.approx(free.logprobs.token_logprobs[0], abs=1e-5)
    assert biased.logprobs.token_logprobs[0] < max(top.values())


def test_named_tokens_are_reported_instead_of_the_most_likely(client, tiny_server, log_softmax):
    prompt, named = token_ids(tiny_server, TEXTS[0]), [40, 7, 41]
    for extra in ({"logprobs": 0}, {"logprobs": 3}):
        body = ON | {"logprob_token_ids": named, "return_tokens_as_token_ids": True}
        options = OPTIONS | {"max_tokens": 1, "prompt": prompt, "extra_body": body} | extra
        [top] = client.completions.create(**options).choices[0].logprobs.top_logprobs
        row = log_softmax(prompt)[-1]
        expected = {f"token_id:{i}": row[i].item() for i in {*named, int(row.argmax())}}
        assert top == pytest.approx(expected, abs=1e-3)


def test_the_token_ids_of_each_prompt_stand_in_its_choices(client, tiny_server):
    options = OPTIONS | {"prompt": TEXTS, "n": 2, "extra_body": ON | {"return_token_ids": True}}
    expected = [token_ids(tiny_server, text) for text in TEXTS for _ in range(2)]
    whole = client.completions.create(**options).choices
    assert [choice.model_extra["prompt_token_ids"] for choice in whole] == expected
    found = [[] for _ in whole]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.model_extra.get("prompt_token_ids", [])
    assert found == expected


def test_texts_and_token_ids_of_all_lengths_are_scored_alike_in_one_batch(client, tiny_server, log_softmax):
    texts = ["a", *(" ".join(TEXTS[: 1 + i % 3]) + " over" * i for i in range(9))]
    ids = [token_ids(tiny_server, text) for text in texts]
    options = OPTIONS | {"max_tokens": 1, "echo": True, "logprobs": 1}
    expected = [log_softmax(prompt) for prompt in ids]
    for prompts in (texts, ids):
        choices = client.completions.create(**options, prompt=prompts).choices
        for prompt, levels, choice in zip(ids, expected, choices, strict=True):
            scores = [levels[i, token_id].item() for i, token_id in enumerate(prompt[1:])]
            assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(scores, abs=1e-3)


def test_processed_log_probabilities_are_of_the_sampled_distribution(client):
    body = ON | {"logprobs_mode": "processed", "top_k": 2}
    options = OPTIONS | {"prompt": TEXTS[0], "logprobs": 5, "temperature": 0.5, "extra_body": body}
    for top in client.completions.create(**options).choices[0].logprobs.top_logprobs:
        assert sum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-5)
        assert len(top) == 2


def test_a_stream_closed_early_frees_all_its_slots(client, tiny_server):
    options = OPTIONS | {"prompt": TEXTS, "n": 3, "max_tokens": 200}
    stream = client.completions.create(**options, stream=True)
    next(stream)
    stream.close()
    wait_until_idle(tiny_server)


def test_a_client_that_leaves_before_the_answer_frees_all_its_slots(client, tiny_server):
    options = OPTIONS | {"prompt": TEXTS, "n": 3, "max_tokens": 200}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.01).completions.create(**options)
    wait_until_idle(tiny_server)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["x", 3]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], [2, 10**6]]}, "prompt[1][1]"),
        ({"prompt": ["x", "x " * 900]}, "prompt[1]"),
        ({"prompt": [[1]] * 5000}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 100, "prompt": [[1]] * 100}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
        ({"logprobs": 0, "extra_body": {"logprob_token_ids": [10**6]}}, "logprob_token_ids"),
        ({"extra_body": {"logprob_token_ids": [5]}}, "logprob_token_ids"),
        ({"logprobs": 0, "extra_body": {"logprobs_mode": "raw_logits"}}, "logprobs_mode"),
    ],
)
def test_a_bad_request_names_its_field(client, tiny_server, change, param):
    wait_until_idle(tiny_server)    # other tests leave
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**(OPTIONS | {"prompt": "hello"} | change))
    assert raised.value.param == param
    assert raised.value.body["message"]
    assert tiny_server.model.engine.num_accepted == 0


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**(OPTIONS | {"model": "nobody"}), prompt="hello")
