"""Text dialects: one logical request for text as each route, gRPC and the SDK write it, with answers alike.

A request is a prompt, or the messages of a chat, with sampling parameters by their names in `SamplingParams`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc

from genserve import Client
from genserve.errors import GenserveError, InvalidRequest
from tests.faults.shared_server import Response, SharedServer

MODEL = "tiny"
Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, or why there is none.

    Attributes:
        error: its message; empty: there is an answer.
        is_clients_fault: whether the error says that the client can mend the request; None: the dialect does
            not say.
        usage: tokens of prompt and answer; None: the dialect does not say.
        finish: "length" or "stop"; None: the dialect does not say.
    """

    error: str = ""
    is_clients_fault: bool | None = False
    text: str = ""
    usage: tuple[int, int] | None = None
    finish: str | None = None


def _failed(response: Response) -> Answer:
    assert response.status in range(400, 600), (response.status, response.body)
    assert response.headers["content-type"].startswith("application/json")
    return Answer(error=response.error, is_clients_fault=response.status < 500)


def _over_http(
    server: SharedServer, path: str, body: Mapping[str, Any], read: Callable[[Any, Response], Answer]
) -> Answer:
    response = server.post(path, body)
    return read(response.json(), response) if response.status == 200 else _failed(response)


def _renamed(params: Params, **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in params.items()}


def tgi(server: SharedServer, prompt: Any, params: Params) -> Answer:
    given = _renamed(params, max_tokens="max_new_tokens") | {"details": True}
    if given.get("temperature") == 0:   # TGI's clients leave it out
        del given["temperature"]

    def read(answer: Any, response: Response) -> Answer:
        details = answer["details"]
        usage = (int(response.headers["x-prompt-tokens"]), details["generated_tokens"])
        finish = "length" if details["finish_reason"] == "length" else "stop"
        return Answer(text=answer["generated_text"], usage=usage, finish=finish)

    return _over_http(server, "/generate", {"inputs": prompt, "parameters": given}, read)


def completions(server: SharedServer, prompt: Any, params: Params) -> Answer:
    def read(answer: Any, _: Response) -> Answer:
        [choice], usage = answer["choices"], answer["usage"]
        tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        return Answer(text=choice["text"], usage=tokens, finish=choice["finish_reason"])

    return _over_http(server, "/v1/completions", {"model": MODEL, "prompt": prompt, **params}, read)


def _of_ollama(answer: Any, text: str) -> Answer:
    usage = (answer["prompt_eval_count"], answer["eval_count"])
    return Answer(text=text, usage=usage, finish=answer["done_reason"])


def _ollama(params: Params) -> dict[str, Any]:
    options = _renamed(params, max_tokens="num_predict", repetition_penalty="repeat_penalty")
    # Its defaults are not those of the others.
    return {"model": MODEL, "stream": False, "options": {"top_k": 0, "top_p": 1.0, **options}}


def ollama_generate(server: SharedServer, prompt: Any, params: Params) -> Answer:
    body = _ollama(params) | {"prompt": prompt, "raw": True}
    return _over_http(
        server, "/api/generate", body, lambda answer, _: _of_ollama(answer, answer["response"])
    )


_TENSORS = {"stop": "stop_words", "seed": "random_seed"}


def kserve(server: SharedServer, prompt: Any, params: Params) -> Answer:
    body = {"text_input": prompt, **_renamed(params, **_TENSORS)}
    return _over_http(
        server, f"/v2/models/{MODEL}/generate", body, lambda answer, _: Answer(text=answer["text_output"])
    )


_TYPES = {
    "stop_words": "BYTES", "bad_words": "BYTES", "text_input": "BYTES", "random_seed": "UINT64",
    "max_tokens": "INT32", "min_tokens": "INT32", "top_k": "INT32", "beam_width": "INT32",
}  # fmt: skip
_NUMPY = {"BYTES": object, "UINT64": np.uint64, "INT32": np.int32, "FP32": np.float32}


def grpc(server: SharedServer, prompt: Any, params: Params) -> Answer:
    tensors = []
    for name, value in {"text_input": prompt, **_renamed(params, **_TENSORS)}.items():
        kind = _TYPES.get(name, "FP32")
        values = [text.encode() for text in np.atleast_1d(value)] if kind == "BYTES" else value
        array = np.array(values, dtype=_NUMPY[kind]).reshape(1, -1)
        tensor = tritonclient.grpc.InferInput(name, array.shape, kind)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(partial(lambda result, error: answers.put((result, error))))
        client.async_stream_infer(MODEL, tensors)
        client.stop_stream()
        result, error = answers.get(timeout=60)
    if error is not None:
        return Answer(error=str(error.message()), is_clients_fault=None)
    return Answer(text=result.as_numpy("text_output").flat[0].decode())


def sdk(server: SharedServer, prompt: Any, params: Params) -> Answer:
    return _by_sdk(server, lambda client: client.generate(prompt, model=MODEL, **params))


def sdk_chat(server: SharedServer, messages: Any, params: Params) -> Answer:
    return _by_sdk(server, lambda client: client.chat(messages, model=MODEL, **params))


def _by_sdk(server: SharedServer, ask: Callable[[Client], Any]) -> Answer:
    with Client(server.url, max_retries=0) as client:
        try:
            completion = ask(client)
        except GenserveError as error:
            return Answer(error=error.message, is_clients_fault=isinstance(error, InvalidRequest))
    usage = (completion.usage.prompt_tokens, completion.usage.completion_tokens)
    finish = "length" if completion.finish_reason == "length" else "stop"
    return Answer(text=completion.text, usage=usage, finish=finish)


def chat_completions(server: SharedServer, messages: Any, params: Params) -> Answer:
    def read(answer: Any, _: Response) -> Answer:
        [choice], usage = answer["choices"], answer["usage"]
        tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        return Answer(text=choice["message"]["content"], usage=tokens, finish=choice["finish_reason"])

    body = {"model": MODEL, "messages": messages, **params}
    return _over_http(server, "/v1/chat/completions", body, read)


def messages_api(server: SharedServer, messages: Any, params: Params) -> Answer:
    def read(answer: Any, _: Response) -> Answer:
        usage = answer["usage"]
        num_prompt = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
        text = "".join(block["text"] for block in answer["content"])
        finish = {"max_tokens": "length"}.get(answer["stop_reason"], "stop")
        return Answer(text=text, usage=(num_prompt, usage["output_tokens"]), finish=finish)

    body = {"model": MODEL, "messages": messages, **_renamed(params, stop="stop_sequences")}
    return _over_http(server, "/v1/messages", body, read)


def responses(server: SharedServer, messages: Any, params: Params) -> Answer:
    def read(answer: Any, _: Response) -> Answer:
        usage = answer["usage"]
        texts = [part["text"] for item in answer["output"] for part in item["content"]]
        finish = {"completed": "stop", "incomplete": "length"}[answer["status"]]
        return Answer(
            text="".join(texts), usage=(usage["input_tokens"], usage["output_tokens"]), finish=finish
        )

    body = {"model": MODEL, "input": messages, **_renamed(params, max_tokens="max_output_tokens")}
    return _over_http(server, "/v1/responses", body, read)


def ollama_chat(server: SharedServer, messages: Any, params: Params) -> Answer:
    body = _ollama(params) | {"messages": messages}
    return _over_http(
        server, "/api/chat", body, lambda answer, _: _of_ollama(answer, answer["message"]["content"])
    )


def gemini(server: SharedServer, messages: Any, params: Params) -> Answer:
    def read(answer: Any, _: Response) -> Answer:
        [candidate], usage = answer["candidates"], answer["usageMetadata"]
        finish = {"MAX_TOKENS": "length", "STOP": "stop"}[candidate["finishReason"]]
        tokens = (usage["promptTokenCount"], usage["candidatesTokenCount"])
        return Answer(text="".join(map(_text, candidate["content"]["parts"])), usage=tokens, finish=finish)

    names = {"max_tokens": "maxOutputTokens", "stop": "stopSequences", "top_logprobs": "logprobs"}
    body = {"contents": messages, "generationConfig": _renamed(params, **names)}
    if isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages):
        roles = {"assistant": "model"}
        turns = [
            {"role": roles.get(one["role"], one["role"]), "parts": [{"text": one["content"]}]}
            for one in messages
        ]
        body["contents"] = [turn for turn in turns if turn["role"] != "system"]
        if system := [part for turn in turns if turn["role"] == "system" for part in turn["parts"]]:
            body["systemInstruction"] = {"parts": system}
    return _over_http(server, f"/v1beta/models/{MODEL}:generateContent", body, read)


def _text(part: Mapping[str, Any]) -> str:
    return str(part["text"])


Ask = Callable[[SharedServer, Any, Params], Answer]
# Those that take a prompt, and those that take a chat.
PROMPTS: tuple[Ask, ...] = (tgi, completions, ollama_generate, kserve, grpc, sdk)
CHATS: tuple[Ask, ...] = (chat_completions, messages_api, responses, ollama_chat, gemini, sdk_chat)
HTTP_PROMPTS: tuple[Ask, ...] = (tgi, completions, ollama_generate)
HTTP_CHATS: tuple[Ask, ...] = (chat_completions, messages_api, responses, ollama_chat, gemini)
