"""A reasoning model: the tiny one with reasoning tags and a decoder that writes a fixed text."""

from __future__ import annotations

import json

import httpx2
import pytest

from genserve.client.client import Client
from genserve.prompt import Chat, Message
from genserve.sampling.sampling_params import sampling_params
from tests.support.live_server import LiveServer
from tests.support.representatives import with_extended
from tests.support.thinking_model import START, copy_with_tags

SAID = "<think>\nhm, <thin\n</think>\n\nno <think>."
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}{{ '[' + message.reasoning_content + ']' }}{% endif %}"
    "{{ message.content + '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if begins %}{{ '<think>\n' }}{% endif %}"
)
DECODER = """
class TritonPythonModel:
    async def decode(self, sequence):
        begun = sequence.token_ids[:sequence.num_prompt_tokens].count({start}) > 0
        for token_id in {said}[begun:]:
            await sequence.logits()
            sequence.append(token_id)
            if sequence.finished:
                return
        sequence.finish("stop")
"""


@pytest.fixture(scope="module")
def thinker(tiny_repository, tmp_path_factory):
    root = copy_with_tags(tiny_repository, tmp_path_factory.mktemp("thinker") / "repository")
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(TEMPLATE)
    with LiveServer(root) as server:
        said = server.model.tokenizer.encode(SAID)
    decoder = DECODER.format(said=said, start=START)
    (root / "tiny_decoder" / "1" / "model.py").write_text(decoder)
    with LiveServer(root) as server:
        yield server


@pytest.fixture
def http(thinker):
    with httpx2.Client(base_url=thinker.url, timeout=60) as client:
        yield client


def chat(http, *, messages=({"role": "user", "content": "hi"},), **body):
    response = http.post("/v1/chat/completions", json={"messages": [*messages], **body})
    assert response.status_code == 200, response.text
    return response


def test_reasoning_is_separate_from_the_content(http):
    [choice] = chat(http).json()["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "no <think>.",
        "reasoning_content": "hm, <thin",
    }


@pytest.mark.parametrize("begins", [False, True])
def test_the_tokens_of_reasoning_are_counted(http, thinker, begins):
    body = {"n": 2, "chat_template_kwargs": {"begins": begins}}
    whole = chat(http, **body).json()["usage"]
    streamed = chat(http, **body, stream=True, stream_options={"include_usage": True}).text
    [last] = [json.loads(line[6:]) for line in streamed.splitlines() if '"choices": []' in line]
    expected = 2 * len(thinker.model.tokenizer.encode("\nhm, <thin\n"))
    for usage in (whole, last["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == expected


def test_reasoning_begun_by_the_template_is_separate_from_the_content(http):
    [choice] = chat(http, chat_template_kwargs={"begins": True}).json()["choices"]
    assert choice["message"]["reasoning_content"] == "hm, <thin"
    assert choice["message"]["content"] == "no <think>."


def test_a_reasoning_tag_in_a_message_begins_no_reasoning(http):
    [choice] = chat(http, messages=[{"role": "user", "content": "<think>"}]).json()["choices"]
    # The decoder leaves its own tag out, as it saw one.
    assert choice["message"]["content"] == SAID.removeprefix("<think>")
    assert "reasoning_content" not in choice["message"]


def test_reasoning_is_streamed_in_its_own_field(http):
    response = chat(http, stream=True, logprobs=True, return_token_ids=True, n=2)
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    choices = [json.loads(block)["choices"][0] for block in blocks[:-1]]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert all(len(choice["delta"].keys() - {"role"}) <= 1 for choice in mine), "each by itself"
        for field, text in (("reasoning_content", "hm, <thin"), ("content", "no <think>.")):
            assert "".join(choice["delta"].get(field, "") for choice in mine) == text
        ids = [token_id for choice in mine for token_id in choice.get("token_ids", [])]
        entries = [entry for choice in mine for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert len(ids) == len(entries), "each token once"


def test_an_answer_that_ends_within_its_reasoning_has_no_content(http):
    [choice] = chat(http, stop=["hin\n"]).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "hm, <t"}


def test_reasoning_stays_in_the_content_with_separate_reasoning_false(http):
    [choice] = chat(http, separate_reasoning=False).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAID}


@pytest.mark.parametrize(
    "options", [{"structured_outputs": {"json_object": True}}, {"output_parser": {"name": "hide"}}]
)
def test_structured_and_parsed_answers_have_no_reasoning(thinker, options):
    assert thinker.model.builder.message_parser("hello", sampling_params({}), begun=True) is not None
    assert thinker.model.builder.message_parser("hello", sampling_params(options), begun=True) is None


def test_the_python_client_has_the_whole_text(thinker):
    with Client(thinker.url) as client:
        assert client.chat("hi").text == SAID
        assert "".join(delta.text for delta in client.chat_stream("hi")) == SAID


def test_the_reasoning_of_an_earlier_answer_reaches_the_template(http, thinker):
    earlier = {"role": "assistant", "content": "no.", "reasoning_content": "hm<|im_end|>"}
    user = {"role": "user", "content": "hi"}
    answer = chat(http, messages=[user, earlier, user], return_token_ids=True).json()
    tokenizer = thinker.model.tokenizer
    thoughtful = Message(role="assistant", content="no.", reasoning_content="hm<|im_end|>")
    question = Message(role="user", content="hi")
    earlier_chat = Chat(messages=(question, thoughtful, question))
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(earlier_chat)
    assert "[hm<|im_end|>]no.<|im_end|>" in tokenizer.decode(
        answer["prompt_token_ids"], skip_special_tokens=False
    )
    assert answer["prompt_token_ids"].count(tokenizer.token_id("<|im_end|>")) == 3, "one ends each turn"


def test_reasoning_of_a_user_message_is_rejected(http):
    messages = [{"role": "user", "content": "hi", "reasoning_content": "hm"}]
    response = http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].reasoning_content"


# Without special tokens nothing ends a message; with them, `<|im_end|>` does.
PLAIN = (
    "Think in <think>.\n{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if begins %}{{ ' <think>\n' }}{% endif %}{% endif %}"
)
THINKS = {"chat_template_kwargs": {"begins": True}}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
# Says the same, whether the prompt has begun a thought or not.
ENDING_DECODER = DECODER.replace("{said}[begun:]", "{said}")


@pytest.fixture(scope="module", params=[PLAIN, TEMPLATE], ids=["plain", "special tokens"])
def ending(request, tiny_repository, tmp_path_factory):
    """A model whose answers are `hm</think>no.`."""
    root = copy_with_tags(tiny_repository, tmp_path_factory.mktemp("ending") / "repository")
    (root / "tiny_tokenizer" / "1" / "chat_template.jinja").write_text(request.param)
    with LiveServer(root) as server:
        said = server.model.tokenizer.encode("hm</think>no.")
    (root / "tiny_decoder" / "1" / "model.py").write_text(ENDING_DECODER.format(said=said, start=START))
    with LiveServer(root) as server:
        yield server


@pytest.mark.parametrize("stream", with_extended([False, True], always=[True]))
@pytest.mark.parametrize(
    ("turns", "controls", "begun"),
    [
        (["hi"], {}, False),
        (["hi"], THINKS, True),
        (["what is <think>"], {}, False),
        (["<think>"], {}, False),
        (["<think>"], THINKS, True),
        (["</think>"], THINKS, True),
        (["hi", "<think>", "why?"], {}, False),
        (["hi", "<think>", "why?"], THINKS, True),
        (["<think>", "It is"], GOES_ON, False),
        (["hi", "<think> It is"], GOES_ON, True),
        (["<think>", "<think> 1+1 </think> It is"], GOES_ON, False),
        (["hi", "<think> <|im_end|> It is"], GOES_ON, True),
        (["hi", "It is", "<think> why"], GOES_ON, False),
    ],
)
def test_reasoning_begins_in_the_template_or_in_the_continued_message(ending, turns, controls, begun, stream):
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    with httpx2.Client(base_url=ending.url, timeout=60) as http:
        response = chat(http, messages=messages, stream=stream, **controls)
    if stream:
        blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
        parts = [json.loads(block)["choices"][0]["delta"] for block in blocks[:-1]]
    else:
        parts = [response.json()["choices"][0]["message"]]
    reasoning, content = (
        "".join(part.get(field, "") for part in parts) for field in ("reasoning_content", "content")
    )
    assert (reasoning, content) == (("hm", "no.") if begun else ("", "hm</think>no."))


def test_a_prompt_truncated_at_its_end_begins_no_reasoning(ending):
    messages = (Message(role="user", content="<think> " * 40),)
    prompt = Chat(messages=messages, template_kwargs={"begins": True})
    begun = {
        side: ending.model.prepare(
            prompt, sampling_params({"truncate_prompt_tokens": 60, "truncation_side": side, "max_tokens": 1})
        ).begins_reasoning
        for side in ("left", "right")
    }
    assert begun == {"left": True, "right": False}


def test_a_thinking_budget_ignores_reasoning_in_the_users_text(ending):
    prompt = Chat(messages=(Message(role="user", content="<think>"),))
    params = sampling_params({"thinking_token_budget": 0, "max_tokens": 8})
    assert not ending.model.prepare(prompt, params).begins_reasoning
    assert ending.model.prepare("<think>", params).begins_reasoning, "a plain prompt may begin reasoning"
