"""Embeddings and rerankers over a hand-written repository, asked by the clients of OpenAI and Ollama."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import ollama
import openai
import pytest

from genserve import Client
from tests.support.command_line import invoke
from tests.support.encoder_repository import (
    MAX_LENGTH,
    SIZE,
    WORDS,
    encoder_repository,
    ids_of,
    score_of,
    vector_of,
)
from tests.support.live_server import LiveServer, wait_until

TEXTS = ["the sea is calm", "a mountain", "salt water and the deep sea is calm", "unknown words", ""]
LONG = " ".join(["sea"] * MAX_LENGTH)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(encoder_repository(tmp_path_factory.mktemp("vectors"))) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def close(found: object, expected: object) -> bool:
    return bool(np.allclose(np.array(found, np.float32), np.array(expected, np.float32), atol=1e-5, rtol=0))


@pytest.mark.parametrize("encoding_format", ["float", "base64", openai.omit])
def test_openais_client_reads_the_vectors_of_texts_of_all_lengths(client, encoding_format):
    # Without a format the client asks for base64, and decodes it.
    answer = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=encoding_format)
    vectors = [item.embedding for item in answer.data]
    if encoding_format == "base64":
        vectors = [np.frombuffer(b64decode(text), "<f4") for text in vectors]
    assert close(vectors, [vector_of(text) for text in TEXTS])
    assert [item.index for item in answer.data] == [*range(len(TEXTS))]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(ids_of(text)) for text in TEXTS)
    assert answer.model == "vectors"


def test_token_ids_are_read_as_they_are(client):
    one, two = TEXTS[:2]
    single = client.embeddings.create(model="vectors", input=ids_of(one))
    assert close(single.data[0].embedding, vector_of(one))
    both = client.embeddings.create(model="vectors", input=[ids_of(one), ids_of(two)])
    assert close([item.embedding for item in both.data], [vector_of(one), vector_of(two)])


def test_dimensions_shorten_and_scale_the_vectors(client):
    answer = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=3)
    expected = vector_of(TEXTS[0])[:3]
    assert close(answer.data[0].embedding, expected / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": LONG}, "input[0]"),
        ({"input": ["sea", "sea", "sea", "sea", "sea", LONG]}, "input[5]"),
        ({"input": [1] * (MAX_LENGTH + 1)}, "input[0]"),
        ({"input": [[1, len(WORDS)]]}, "input[0]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "sea", "dimensions": SIZE + 1}, "dimensions"),
        ({"input": "sea", "dimensions": 0}, "dimensions"),
        ({"input": LONG, "dimensions": SIZE + 1}, "dimensions"),  # before any text is read
        ({"input": "sea", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "sea", "truncate_prompt_tokens": 7}, "truncate_prompt_tokens"),
        ({"input": "sea", "model": "ranker"}, "model"),
        ({"input": ["sea"] * 2049}, "input"),
    ],
)
def test_a_bad_request_names_its_field(http, fields, field):
    response = http.post("/v1/embeddings", json={"model": "vectors"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("token_id", [-1, len(WORDS)])
def test_an_unknown_token_id_is_named(http, token_id):
    response = http.post("/v1/embeddings", json={"model": "vectors", "input": [[1], [1, token_id, 2]]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        f"input[1] has the token id {token_id}, which the model does not have; "
        f"its token ids are from 0 to {len(WORDS) - 1}"
    )


def test_a_model_that_is_not_there_or_of_another_kind_is_not_found(http):
    for model in ("no", "vectors_tokenizer"):
        assert http.post("/v1/embeddings", json={"model": model, "input": "sea"}).status_code == 404


def test_a_long_text_is_truncated_if_the_client_asks(http, server):
    expected = vector_of(" ".join(["sea"] * (MAX_LENGTH - 2)))
    body = {"model": "vectors", "input": LONG, "truncate_prompt_tokens": -1}
    assert close(http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"], expected)
    with ollama.Client(server.url) as client:
        assert close(client.embed("vectors", LONG).embeddings[0], expected)
        with pytest.raises(ollama.ResponseError) as raised:
            client.embed("vectors", LONG, truncate=False)
    assert raised.value.status_code == 400


def test_ollamas_client_reads_vectors(server):
    with ollama.Client(server.url) as client:
        answer = client.embed("vectors:latest", TEXTS[:3])
        assert close(answer.embeddings, [vector_of(text) for text in TEXTS[:3]])
        assert answer.prompt_eval_count == sum(len(ids_of(text)) for text in TEXTS[:3])
        assert close(client.embed("vectors", TEXTS[0], dimensions=SIZE).embeddings[0], vector_of(TEXTS[0]))
        assert client.embed("vectors", "").embeddings == []
        assert close(client.embeddings("vectors", TEXTS[0]).embedding, vector_of(TEXTS[0]))


def test_a_reranker_orders_documents_by_their_scores(http):
    documents = ["a mountain is high", "the sea is deep salt water", "what"]
    expected = [score_of("what is deep", text) for text in documents]
    body = {"model": "ranker", "query": "what is deep", "documents": documents}
    answer = http.post("/v1/rerank", json=body).json()
    best = sorted(range(3), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == best
    assert close([result["relevance_score"] for result in answer["results"]], [expected[i] for i in best])
    assert [result["document"]["text"] for result in answer["results"]] == [documents[i] for i in best]
    assert answer["usage"]["total_tokens"] == sum(4 + len(text.split()) + 2 for text in documents)
    few = http.post("/rerank", json=body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert [set(result) for result in few] == [{"index", "relevance_score"}]


def test_scores_pair_one_text_with_each_or_texts_in_turn(http):
    pairs = [("the sea", "salt water"), ("the sea", "a mountain")]
    body = {"model": "ranker", "text_1": "the sea", "text_2": ["salt water", "a mountain"]}
    for first in ("the sea", ["the sea", "the sea"]):
        answer = http.post("/v1/score", json=body | {"text_1": first}).json()
        assert close([item["score"] for item in answer["data"]], [score_of(*pair) for pair in pairs])
    assert http.post("/v1/score", json=body | {"text_1": ["a", "b", "c"]}).status_code == 400
    cosine = http.post("/v1/score", json=body | {"model": "vectors"}).json()["data"][0]["score"]
    assert close(cosine, vector_of("the sea") @ vector_of("salt water"))


def test_a_long_pair_is_rejected_or_loses_the_end_of_the_longer_text(http):
    body = {"model": "ranker", "query": "the sea", "documents": ["a", LONG]}
    response = http.post("/v1/rerank", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents[1]")
    results = http.post("/v1/rerank", json=body | {"truncate": True}).json()["results"]
    score = next(result["relevance_score"] for result in results if result["index"] == 1)
    assert close(score, score_of("the sea", " ".join(["sea"] * (MAX_LENGTH - 5))))


def test_kserve_infers_with_the_ensemble_as_it_is(http):
    texts = {"name": "text_input", "datatype": "BYTES", "shape": [3, 1], "data": TEXTS[:3]}
    answer = http.post("/v2/models/vectors/infer", json={"inputs": [texts]}).json()
    [output] = answer["outputs"]
    assert output["shape"] == [3, SIZE]
    assert close(output["data"], np.concatenate([vector_of(text) for text in TEXTS[:3]]))
    long = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [LONG]}
    assert http.post("/v2/models/vectors/infer", json={"inputs": [long]}).status_code == 400


def test_an_unknown_token_fails_its_own_request_alone(server):
    def ask(token: int) -> int:
        tensors = [
            {"name": name, "datatype": "INT64", "shape": [1, 2], "data": data}
            for name, data in {
                "input_ids": [1, token],
                "attention_mask": [1, 1],
                "token_type_ids": [0, 0],
            }.items()
        ]
        url = f"{server.url}/v2/models/vectors_encoder/infer"
        return httpx2.post(url, json={"inputs": tensors}, timeout=60).status_code

    with ThreadPoolExecutor(8) as threads:
        statuses = [*threads.map(ask, [2, 999] * 8)]
    assert statuses == [200, 400] * 8


def test_cosines_have_the_limits_and_fields_of_their_own_texts(http):
    def param(route: str, **fields: object) -> object:
        reply = http.post(route, json={"model": "vectors"} | fields)
        return reply.json()["error"]["param"] if reply.is_error else reply.status_code

    assert param("/v1/rerank", query="sea", documents=["sea", LONG]) == "documents[1]"
    assert param("/v1/rerank", query=LONG, documents=["sea"]) == "query[0]"
    assert param("/v1/score", text_1=["sea", "sea", LONG], text_2=["a", "b", "c"]) == "text_1[2]"
    most = [f"{index}" for index in range(2048)]
    assert param("/v1/rerank", query="sea", documents=most) == 200
    assert param("/v1/rerank", query="sea", documents=[*most, "sea"]) == "documents"


def test_the_sdk_asks_for_vectors_and_scores(server: LiveServer) -> None:
    scores = [score_of("sea", text) for text in TEXTS]
    with Client(server.url) as client:
        assert close(client.embed(TEXTS, model="vectors"), [vector_of(text) for text in TEXTS])
        assert len(client.embed(TEXTS[0], model="vectors", dimensions=3)[0]) == 3
        assert close(client.score("sea", TEXTS, model="ranker"), scores)
        best = client.rerank("sea", TEXTS, model="ranker", top_n=2)
    assert [index for index, _ in best] == np.argsort(scores)[::-1][:2].tolist()
    assert close([score for _, score in best], sorted(scores)[::-1][:2])


def test_models_of_vectors_and_scores_are_listed_and_described(http, server):
    listed = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert {name: model["capabilities"] for name, model in listed.items()} == {
        "ranker": ["rerank"], "vectors": ["embedding"]
    }  # fmt: skip
    assert listed["vectors"]["max_model_len"] == MAX_LENGTH
    assert http.get("/v1/models/vectors").json() == listed["vectors"]
    with Client(server.url) as client:
        assert client.models() == []  # none of them generates text
    with ollama.Client(server.url) as client:
        tagged = {model.model: model for model in client.list().models}
        assert [*tagged] == ["ranker:latest", "vectors:latest"]
        weights = encoder_weights(server)
        assert tagged["vectors:latest"].size == weights.stat().st_size
        assert [model.model for model in client.ps().models] == [*tagged]
        shown = client.show("Vectors:latest")
        assert shown.capabilities == ["embedding"]
        assert shown.modelinfo["unknown.embedding_length"] == SIZE
        assert shown.modelinfo["unknown.context_length"] == MAX_LENGTH
        assert client.show("ranker").capabilities == ["rerank"]


def test_a_model_of_vectors_is_loaded_on_demand_and_deleted(tmp_path):
    root = encoder_repository(tmp_path)
    with (
        LiveServer(root, model_control_mode="on-demand") as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
        ollama.Client(server.url) as client,
    ):
        assert http.get("/v1/models/vectors").json()["status"]["value"] == "unloaded"
        assert [model.model for model in client.list().models] == ["ranker:latest", "vectors:latest"]
        assert client.show("vectors").capabilities == ["embedding"]
        assert client.ps().models == []
        # Neither a model without a name among two nor a stage is loaded.
        for body in ({}, {"model": "no"}, {"model": "vectors_tokenizer"}):
            assert http.post("/v1/embeddings", json={"input": "sea"} | body).status_code == 404
        assert client.ps().models == []
        assert close(client.embed("Vectors:latest", TEXTS[0]).embeddings[0], vector_of(TEXTS[0]))
        [loaded] = client.ps().models
        assert (loaded.model, loaded.context_length) == ("vectors:latest", MAX_LENGTH)
        assert http.get("/v1/models/vectors").json()["status"]["value"] == "loaded"
        client.embed("vectors", "", keep_alive=0)
        wait_until(lambda: client.ps().models == [])
        with pytest.raises(ollama.ResponseError, match="stage of vectors") as raised:
            client.delete("vectors_encoder")
        assert raised.value.status_code == 400
        client.delete("vectors:latest")
        assert [model.model for model in client.list().models] == ["ranker:latest"]
        answer = http.post("/v1/score", json={"text_1": "sea", "text_2": "sea"})  # the only one now
        assert close(answer.json()["data"][0]["score"], score_of("sea", "sea"))
    assert not [*root.glob("vectors*")]


PROMPTS = {"query": "what is ", "passage": "the sea\n", "other": "deep "}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    parameters = {"prompts": json.dumps(PROMPTS), "default_prompt_name": "other"}
    root = encoder_repository(tmp_path_factory.mktemp("prompted"), prompts=parameters)
    with LiveServer(root) as server:
        yield server


def test_prompts_of_the_model_are_written_before_texts(prompted):
    with openai.OpenAI(base_url=f"{prompted.url}/v1", api_key="none", max_retries=0) as client:
        for extra, prompt in (
            ({"prompt_name": "query"}, "what is "),
            ({"input_type": "query"}, "what is "),
            ({"input_type": "document"}, "the sea\n"),  # the model calls it passage
            ({"input_type": "passage"}, "the sea\n"),
            ({}, "deep "),
        ):
            for texts in (TEXTS[0], TEXTS[:2]):
                answer = client.embeddings.create(model="vectors", input=texts, extra_body=extra)
                expected = [vector_of(prompt + one) for one in ([texts] if texts == TEXTS[0] else texts)]
                assert close([one.embedding for one in answer.data], expected)
        answer = client.embeddings.create(model="vectors", input=[ids_of("sea")])
        assert close(answer.data[0].embedding, vector_of("sea"))  # token ids are read as they are
        for name in ("no", ""):
            with pytest.raises(openai.BadRequestError) as raised:
                client.embeddings.create(model="vectors", input="sea", extra_body={"prompt_name": name})
            assert raised.value.param == "prompt_name"
    with Client(prompted.url) as client:
        assert close(client.embed("sea", model="vectors", prompt_name="query"), [vector_of("what is sea")])
    with ollama.Client(prompted.url) as client:
        assert close(client.embed("vectors", "sea").embeddings[0], vector_of("deep sea"))
        assert close(client.embeddings("vectors", "sea").embedding, vector_of("deep sea"))
    body = {"model": "vectors", "query": "deep", "documents": ["salt water"]}
    [result] = httpx2.post(f"{prompted.url}/v1/rerank", json=body).json()["results"]
    expected = vector_of("what is deep") @ vector_of("the sea\nsalt water")
    assert close(result["relevance_score"], expected)
    body = {"model": "vectors", "text_1": "deep", "text_2": "salt water"}
    [scored] = httpx2.post(f"{prompted.url}/v1/score", json=body).json()["data"]
    assert close(scored["score"], vector_of("deep deep") @ vector_of("deep salt water"))


@pytest.mark.parametrize(
    "parameters", [{"prompts": "query: "}, {"prompts": '{"a": 1}'}, {"default_prompt_name": "query"}]
)
def test_prompts_that_cannot_be_read_fail_the_load(tmp_path, parameters):
    root = encoder_repository(tmp_path, prompts=parameters)
    checked = invoke(["check", "--model-repository", str(root)])
    assert checked.exit_code == 1
    assert "prompts" in checked.stdout
    with LiveServer(root, exit_on_error=False) as server:
        assert "prompts" in str(server.server.services.repository.errors["vectors_tokenizer"])
        answer = httpx2.get(f"{server.url}/v1/models").json()
        assert [model["id"] for model in answer["data"]] == ["ranker"]


def test_a_broken_config_hides_no_other_model_on_demand(tmp_path):
    root = encoder_repository(tmp_path)
    config = root / "vectors_tokenizer" / "config.pbtxt"
    config.write_text(config.read_text().replace(f'"{MAX_LENGTH}"', '"many"'))
    with LiveServer(root, model_control_mode="on-demand") as server:
        answer = httpx2.get(f"{server.url}/v1/models").json()
    assert [model["id"] for model in answer["data"]] == ["ranker"]


def encoder_weights(server):
    [root] = server.server.services.settings.model_repository
    return root / "vectors_encoder" / "1" / "model.onnx"
