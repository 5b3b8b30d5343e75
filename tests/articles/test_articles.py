"""The articles' own requests to their own models, as they were written; names of hosts and ports apart."""

from __future__ import annotations

import ast
import json
import re
import runpy
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import requests
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from transformers import AutoTokenizer

from examples.networks import EXAMPLES
from tests.backends.networks import BLOOM_VOCABULARY, CHAT_VOCABULARY, SimpleModel
from tests.support.live_server import LiveServer

pytestmark = pytest.mark.extended


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.load(path)


# The client of triton_trees needs a text model: test_trees.py.
CLIENTS = sorted(set(EXAMPLES.glob("triton_*/client.py")) - set(EXAMPLES.glob("triton_trees/client.py")))


@pytest.mark.parametrize("program", CLIENTS, ids=lambda path: path.parent.name)
def test_the_client_of_each_example_gets_its_answers(program, server, monkeypatch, capsys) -> None:
    monkeypatch.setenv("GENSERVE_URL", server.url)
    monkeypatch.setenv("GENSERVE_GRPC", server.grpc_url)
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()


def infer(server: LiveServer, model: str, request_data: dict, *, version: str = "") -> dict:
    url = f"{server.url}/v2/models/{model}{version}/infer"
    return requests.post(url=url, json=request_data, timeout=60).json()


def tokens(name: str, ids: list[list[int]]) -> httpclient.InferInput:
    array = np.array(ids, dtype=np.int64)
    tensor = httpclient.InferInput(name, list(array.shape), "INT64")
    tensor.set_data_from_numpy(array)
    return tensor


def test_the_chat_loop_answers_with_the_tokens_and_their_probabilities(server: LiveServer) -> None:
    ids = [[13086, 5, 6, 7]]
    with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
        inputs = [
            tokens("INPUT__0", ids),
            tokens("INPUT__1", [[1, 1, 1, 1]]),
            tokens("INPUT__2", ids),
        ]
        answer = client.infer("ibuddha_chitchat_bls", inputs)
    output_ids, confidences = answer.as_numpy("OUTPUT__0"), answer.as_numpy("OUTPUT__1")
    assert (output_ids.dtype, confidences.dtype) == (np.int32, np.float32)
    assert 1 <= len(output_ids) == len(confidences) <= 64
    assert ((output_ids >= 0) & (output_ids < CHAT_VOCABULARY)).all()
    assert not set(output_ids.tolist()) & {0, 2, 1, 13086, 13087}
    assert ((confidences > 0) & (confidences <= 1)).all()


def test_the_chat_model_is_its_torchscript(server: LiveServer, articles_repository: Path) -> None:
    network = load_torchscript(articles_repository / "ibuddha_chitchat" / "1" / "model.pt")
    ids = [[13086, 5, 6, 7], [3, 4, 5, 6]]
    mask = [[1, 1, 1, 1], [1, 1, 1, 0]]
    with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
        inputs = [tokens("INPUT__0", ids), tokens("INPUT__1", mask), tokens("INPUT__2", ids)]
        answer = client.infer("ibuddha_chitchat", inputs)
    expected = network(torch.tensor(ids), torch.tensor(mask), torch.tensor(ids)).detach().numpy()
    np.testing.assert_allclose(answer.as_numpy("OUTPUT__0"), expected, rtol=1e-4, atol=1e-4)


def test_the_sentence_model_answers_with_vectors(server: LiveServer, articles_repository: Path) -> None:
    session = onnxruntime.InferenceSession(
        articles_repository / "sps_sbert_onnx" / "1" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    feeds = {
        "input_ids": np.array([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": np.array([[1, 1, 1], [1, 1, 0]]),
        "token_type_ids": np.zeros((2, 3), dtype=np.int64),
    }
    [expected] = session.run(["vector"], feeds)
    with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
        inputs = [tokens(name, array.tolist()) for name, array in feeds.items()]
        answer = client.infer("sps_sbert_onnx", inputs)
    assert answer.as_numpy("vector").shape == (2, 768)
    np.testing.assert_allclose(answer.as_numpy("vector"), expected, rtol=1e-5, atol=1e-6)


def test_the_model_with_two_outputs_answers_as_printed(server: LiveServer, articles_repository: Path) -> None:
    data = [[1, 2, 3], [4, 5, 6]]
    request_data = {
        "inputs": [{"name": "input__0", "shape": [2, 3], "datatype": "INT64", "data": data}],
        "outputs": [{"name": "output__0"}, {"name": "output__1"}],
    }
    res = infer(server, "fc_model_pt", request_data, version="/versions/1")
    network = load_torchscript(articles_repository / "fc_model_pt" / "1" / "model.pt")
    expected = [output.detach().numpy() for output in network(torch.tensor([[1, 2, 3], [4, 5, 6]]))]
    assert (res["model_name"], res["model_version"]) == ("fc_model_pt", "1")
    for output, array, name in zip(res["outputs"], expected, ("output__0", "output__1"), strict=True):
        assert (output["name"], output["datatype"]) == (name, "FP32")
        assert output["shape"] == list(array.shape)
        np.testing.assert_allclose(output["data"], array.reshape(-1), rtol=1e-5)
    assert res["outputs"][0]["shape"] == [2, 3, SimpleModel().fc.out_features]


def test_the_custom_model_takes_its_second_output_from_the_other(server: LiveServer) -> None:
    request_data = {
        "inputs": [{"name": "input__0", "shape": [1, 2], "datatype": "INT64", "data": [[1, 2]]}],
        "outputs": [{"name": "output__0"}, {"name": "output__1"}],
    }
    plain = infer(server, "fc_model_pt", request_data, version="/versions/1")
    custom = infer(server, "custom_model", request_data, version="/versions/1")
    assert plain["outputs"][1] == custom["outputs"][1]
    assert custom["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert plain["outputs"][0] != custom["outputs"][0]


def sentiment(server: LiveServer, texts: list) -> list[str]:
    rows = sum(len(text) if isinstance(text, list) else 1 for text in texts)
    raw_data = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [rows, 1], "data": texts}],
        "outputs": [{"name": "prob", "shape": [rows, -1]}],
    }
    res = requests.post(
        f"{server.url}/v2/models/sentiment/infer",
        json.dumps(raw_data, ensure_ascii=True),
        headers={"Content_Type": "application/json"},
        timeout=60,
    )
    [output] = json.loads(res.text)["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("prob", "BYTES", [rows])
    return output["data"]


def test_the_sentiment_model_is_warmed_up_from_its_file_and_batches_20_threads_by_10(
    articles_repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = [f"我 爱 你 {word}" for word in list("美丽的中国好坏") * 15][:102]
    with LiveServer(articles_repository, load_model=("sentiment",)) as server:
        alone = {text: sentiment(server, [text]) for text in set(samples)}
        with ThreadPoolExecutor(20) as executor:
            answers = list(executor.map(lambda text: sentiment(server, [text]), samples))
    printed = re.findall("---------requests in this call (\\d+)", capfd.readouterr().out)
    sizes = [int(size) for size in printed]
    assert sizes[0] == 1  # the warmup, before any request
    assert len(sizes) == 1 + len(alone) + len(sizes[1 + len(alone) :])
    together = sizes[1 + len(alone) :]
    assert sum(together) == 102
    assert max(together) == 10
    assert all(answer == alone[text] for text, answer in zip(samples, answers, strict=True))
    assert {answer for [answer] in answers} <= {"positive", "negative"}


def test_the_sentiment_model_takes_requests_of_several_texts(server: LiveServer) -> None:
    texts = ["我 爱 你", "好 房 间", "坏 房 间"]
    assert sentiment(server, [texts]) == [sentiment(server, [text])[0] for text in texts]


CFG = {
    "bloom_3b_tokenizer": {
        "model_name": "bloom_3b_tokenizer",
        "input_names": "['TEXT']",
        "input_dtypes": "['BYTES']",
        "output_names": "['input_ids', 'attention_mask']",
    },
    "bloom_3b": {
        "model_name": "bloom_3b",
        "input_names": "['input_ids', 'attention_mask']",
        "input_dtypes": "['INT64', 'INT64']",
        "output_names": "['logits']",
    },
}


def test_the_bloom_pair_is_called_by_a_tritonclient_program(
    server: LiveServer, articles_repository: Path
) -> None:
    trt_client = grpcclient.InferenceServerClient(server.grpc_url)
    cfg = CFG
    text = np.array([b"hello world triton", b"bloom"], dtype=object)
    [name] = ast.literal_eval(cfg["bloom_3b_tokenizer"]["input_names"])
    st_token_i = [grpcclient.InferInput(name, [2], "BYTES")]
    st_token_i[0].set_data_from_numpy(text)
    names = ast.literal_eval(cfg["bloom_3b_tokenizer"]["output_names"])
    st_token_io_buf_output = [grpcclient.InferRequestedOutput(name) for name in names]
    st_text_op = trt_client.infer(
        model_name=cfg["bloom_3b_tokenizer"]["model_name"],
        model_version="1",
        inputs=st_token_i,
        outputs=st_token_io_buf_output,
        client_timeout=None,
    )
    ids, masks = (st_text_op.as_numpy(name) for name in names)
    st_i = [grpcclient.InferInput(name, list(ids.shape), "INT64") for name in names]
    st_i[0].set_data_from_numpy(ids)
    st_i[1].set_data_from_numpy(masks)
    [output_name] = ast.literal_eval(cfg["bloom_3b"]["output_names"])
    st_io_buf_output = [grpcclient.InferRequestedOutput(output_name)]
    st_o = trt_client.infer(
        model_name=cfg["bloom_3b"]["model_name"],
        model_version="1",
        inputs=st_i,
        outputs=st_io_buf_output,
        client_timeout=None,
    )
    tokenizer = AutoTokenizer.from_pretrained(articles_repository / "bloom_3b_tokenizer" / "1")
    expected = tokenizer(["hello world triton", "bloom"], padding=True, return_tensors="np")
    assert ids.tolist() == expected["input_ids"].tolist() == [[14, 15, 16], [17, 0, 0]]
    assert masks.tolist() == expected["attention_mask"].tolist()
    session = onnxruntime.InferenceSession(
        articles_repository / "bloom_3b" / "1" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    [logits] = session.run(["logits"], {"input_ids": ids, "attention_mask": masks})
    assert st_o.as_numpy("logits").shape == (2, 3, BLOOM_VOCABULARY)
    np.testing.assert_allclose(st_o.as_numpy("logits"), logits, rtol=1e-5, atol=1e-6)
    trt_client.close()


def test_label_filename_names_the_best_tokens(server: LiveServer) -> None:
    ids = np.array([[14]], dtype=np.int64)
    inputs = [tokens("input_ids", ids.tolist()), tokens("attention_mask", [[1]])]
    with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
        logits = client.infer("bloom_3b", inputs).as_numpy("logits").reshape(-1)
        outputs = [httpclient.InferRequestedOutput("logits", class_count=2)]
        answer = client.infer("bloom_3b", inputs, outputs=outputs).as_numpy("logits")
    best = np.argsort(-logits, kind="stable")[:2]
    expected = [f"{logits[index]:.6f}:{index}:token{index}" for index in best]
    assert [text.decode() for text in answer.reshape(-1)] == expected


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs genserve[tensorflow]")
def test_the_ranker_is_its_saved_model_in_every_batch(server: LiveServer, articles_repository: Path) -> None:
    import tensorflow as tf

    folder = articles_repository / "shansou_rank" / "1" / "model.savedmodel"
    rank = tf.saved_model.load(str(folder)).signatures["serving_default"]
    rng = np.random.default_rng(0)
    names = ("input_ids", "input_mask", "segment_ids")
    batches = [
        dict(zip(names, rng.integers(1, 1000, (3, size, 128), dtype=np.int32), strict=True))
        for size in (1, 3, 16)
    ]

    def ask(batch: dict[str, np.ndarray]) -> np.ndarray:
        inputs = [httpclient.InferInput(name, list(array.shape), "INT32") for name, array in batch.items()]
        for tensor, array in zip(inputs, batch.values(), strict=True):
            tensor.set_data_from_numpy(array)
        with httpclient.InferenceServerClient(server.url.removeprefix("http://")) as client:
            return client.infer("shansou_rank", inputs).as_numpy("output")

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(ask, batches))   # batched together
    for batch, answer in zip(batches, answers, strict=True):
        expected = rank(**{name: tf.constant(array) for name, array in batch.items()})["output"]
        np.testing.assert_array_equal(answer, expected.numpy())
