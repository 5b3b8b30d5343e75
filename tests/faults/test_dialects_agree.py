"""One logical request through every dialect: the same text, usage and reason to end, or the same error."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.shared_server import CANARY
from tests.faults.text_dialects import CHATS, PROMPTS, chat_completions, completions, messages_api, responses

REQUESTS = {
    "greedy": {"max_tokens": 12, "temperature": 0},
    "drawn with a seed": {"max_tokens": 12, "temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9},
    "penalties": {"max_tokens": 12, "temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    "a stop string": {"max_tokens": 12, "temperature": 0, "stop": ["B", "v"]},
    "bad words": {"max_tokens": 12, "temperature": 0, "bad_words": ["B", "m"]},
    "at least some tokens": {"max_tokens": 16, "temperature": 0, "min_tokens": 14},
}
TEXTS = ("hello there", "你好, мир 😀", " \n\t ") * 2


def same(server, asks, asked, params):
    """Ask at the same time, and compare what the dialects say; what one of them leaves out is left out."""
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = list(pool.map(lambda ask: ask(server, asked, params), asks))
    first = answers[0]
    for answer in answers:
        assert not answer.error
        assert answer.text == first.text
        assert answer.usage in (None, first.usage)
        assert answer.finish in (None, first.finish)
    return first


@pytest.mark.parametrize(("name", "text"), list(zip(REQUESTS, TEXTS, strict=True)), ids=list(REQUESTS))
def test_a_prompt_has_one_answer_in_every_dialect(server, name, text):
    same(server, (completions, *PROMPTS), text, REQUESTS[name])


def test_a_draw_from_no_probability_is_the_best_token_in_every_dialect(server):
    """OpenAI's clients and Ollama's send `top_p: 0` for it."""
    greedy = completions(server, TEXTS[0], REQUESTS["greedy"])
    drawn = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.0, "seed": 3}
    assert same(server, PROMPTS, TEXTS[0], drawn).text == greedy.text
    messages = [{"role": "user", "content": TEXTS[0]}]
    best = same(server, CHATS, messages, drawn)
    assert best == chat_completions(server, messages, REQUESTS["greedy"])


@pytest.mark.parametrize("name", REQUESTS)
def test_a_chat_has_one_answer_in_every_dialect_and_that_of_its_tokens(server, name):
    turns = ("hello", "hi", "good bye {{7*7}} <|im_end|>")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    answer = same(server, CHATS, messages, REQUESTS[name])
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert completions(server, ids, REQUESTS[name]) == answer


def test_system_messages_at_the_beginning_are_one_in_every_dialect(server):
    """Many templates accept only one."""
    question = {"role": "user", "content": "hello"}
    texts = ("Be brief.", "Be kind.")
    several = [*({"role": "system", "content": text} for text in texts), question]
    one = [{"role": "system", "content": "\n\n".join(texts)}, question]
    params = REQUESTS["greedy"]
    expected = same(server, CHATS, one, params)
    assert same(server, CHATS, several, params) == expected
    rest = [{"role": "developer", "content": texts[1]}, question]
    developer = [{"role": "system", "content": texts[0]}, *rest]
    assert chat_completions(server, developer, params) == expected
    assert responses(server, rest, {**params, "instructions": texts[0]}) == expected
    assert messages_api(server, several[1:], {**params, "system": texts[0]}) == expected


REJECTED = {
    "an empty prompt": ("", {}, "empty|inputs|messages|input"),
    "a prompt that is too long": (CANARY + "é" * 150, {}, "tokens|context"),
    "a prompt that is certainly too long": (CANARY + "é" * 3000, {}, "tokens|context"),
    "a number that is too high": (CANARY, {"top_p": 1.5}, "top_p"),
    "too many stop strings": (CANARY, {"stop": ["a"] * 65}, "stop"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_an_invalid_request_is_the_clients_fault_in_every_dialect(server, name):
    prompt, params, words = REJECTED[name]
    messages = [{"role": "user", "content": prompt}] if prompt else []
    # Without a prompt, Ollama's clients ask for the model to be loaded.
    asks = [ask for ask in (*PROMPTS, *CHATS) if prompt or "ollama" not in ask.__name__]
    for ask in asks:
        answer = ask(server, prompt if ask in PROMPTS else messages, {"max_tokens": 4, **params})
        assert re.search(words, answer.error), (ask.__name__, answer)
        assert answer.is_clients_fault is not False, (ask.__name__, answer)
