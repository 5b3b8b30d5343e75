"""Requests with named tensors to a text model and its stages."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from genserve.completion import Stream
from genserve.config.config_json import config_json
from genserve.config.parse import parse_message
from genserve.engine.delta_streams import DeltaStream
from genserve.engine.engine_request import LogitsRequest
from genserve.engine.engine_thread import EngineThread
from genserve.errors import Closed, GenserveError, InferenceError, Status
from genserve.inference import Inference, InferenceRequest, InferenceResponse
from genserve.repository.model_versions import ModelState
from genserve.repository.options import ControlMode, RepositoryOptions
from genserve.repository.repository import Repository
from genserve.request_context import CURRENT_REQUEST, NO_KEY, KeyShare, RequestContext
from genserve.sampling.sampling_params import sampling_params
from genserve.tensor import Tensor
from tests.support.live_server import wait_until
from tests.support.step_gate import StepGate

BLS_LOOP = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.generate(request) for request in requests]

    def generate(self, request):
        input_ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        for _ in range(12):
            call = pb_utils.InferenceRequest(
                model_name="tiny_logits",
                requested_output_names=["logits"],
                inputs=[pb_utils.Tensor("input_ids", input_ids)],
            )
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            logits = pb_utils.get_output_tensor_by_name(response, "logits").as_numpy()
            next_id = logits[:, -1].argmax(axis=-1)
            input_ids = np.concatenate([input_ids, next_id[:, np.newaxis]], axis=1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("output_ids", input_ids[0])])
"""
LOOP_CONFIG = """
backend: "python"
input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ 1, -1 ] } ]
output [ { name: "output_ids" data_type: TYPE_INT64 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 4 } ]
"""


@pytest.fixture(scope="module")
def repository(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    root = tmp_path_factory.mktemp("stages") / "models"
    shutil.copytree(tiny_repository, root)
    (root / "loop" / "1").mkdir(parents=True)
    (root / "loop" / "config.pbtxt").write_text(LOOP_CONFIG)
    (root / "loop" / "1" / "model.py").write_text(BLS_LOOP)
    repository = Repository([root])
    repository.start()
    assert repository.errors == {}
    yield repository
    repository.close()


def asked(
    repository: Repository, model: str, *, parameters: dict | None = None, **inputs: np.ndarray
) -> list[InferenceResponse]:
    responses: list[InferenceResponse] = []
    ended = threading.Event()

    def on_response(response: InferenceResponse | None, final: bool) -> None:
        if response is not None:
            responses.append(response)
        if final:
            ended.set()

    tensors = {name: Tensor(name, array) for name, array in inputs.items()}
    request = InferenceRequest(model_name=model, inputs=tensors, parameters=parameters or {})
    repository.submit(Inference(request=request, on_response=on_response))
    assert ended.wait(60)
    for response in responses:
        if response.error is not None:
            raise response.error
    return responses


def text(*rows: str) -> np.ndarray:
    return np.array([[row.encode()] for row in rows], dtype=object)


def of(response: InferenceResponse, name: str) -> np.ndarray:
    output = response.output(name)
    assert output is not None
    return output.array


def greedy_ids(repository: Repository, prompt: list[int], *, count: int) -> list[int]:
    """The ensemble's own greedy tokens, one forward of the logits stage for each."""
    ids = list(prompt)
    for _ in range(count):
        [response] = asked(repository, "tiny_logits", input_ids=np.array([ids], dtype=np.int64))
        ids.append(int(of(response, "logits")[0, -1].argmax()))
    return ids


def test_text_goes_in_and_the_whole_text_comes_out(repository: Repository) -> None:
    ensemble = repository.text_model("tiny")
    [response] = asked(repository, "tiny", text_input=text("hello"), max_tokens=np.array([[6]], np.int32))
    ids = ensemble.tokenizer.encode("hello")
    expected = greedy_ids(repository, ids, count=6)[len(ids) :]
    detokenizer = ensemble.tokenizer.detokenizer()
    whole = "".join(detokenizer.push(token_id) for token_id in expected) + detokenizer.flush()
    assert of(response, "text_output").tolist() == [[whole.encode()]]


def test_a_stream_is_the_same_text_in_parts(repository: Repository) -> None:
    options = {"text_input": text("hello"), "max_tokens": np.array([[6]], np.int32)}
    [whole] = asked(repository, "tiny", **options)
    parts = asked(repository, "tiny", **options, stream=np.array([[True]]))
    assert len(parts) > 1
    joined = b"".join(of(part, "text_output")[0, 0] for part in parts)
    assert joined == of(whole, "text_output")[0, 0]


def test_the_texts_of_a_batch_are_answered_together(repository: Repository) -> None:
    options = {"max_tokens": np.array([[4], [4]], np.int32)}
    [both] = asked(repository, "tiny", text_input=text("hello", "world"), **options)
    for row, word in enumerate(("hello", "world")):
        [alone] = asked(repository, "tiny", text_input=text(word), max_tokens=np.array([[4]], np.int32))
        assert of(both, "text_output")[row, 0] == of(alone, "text_output")[0, 0]


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        ({"repetition_penalty": np.array([[1.5]], np.float32)}, {"repetition_penalty": 1.5}),
        ({"frequency_penalty": np.array([[2.0]], np.float32)}, {"frequency_penalty": 2.0}),
        ({"presence_penalty": np.array([[1.5]], np.float32)}, {"presence_penalty": 1.5}),
        ({"bad_words": np.array([[b"ep", b"\x0c"]], dtype=object)}, {"bad_words": ("ep", "\x0c")}),
    ],
)
def test_tensors_and_options_ask_for_the_same_answer(
    repository: Repository, tensors: dict, options: dict
) -> None:
    length = np.array([[24]], np.int32)
    [answer] = asked(repository, "tiny", text_input=text("hello"), max_tokens=length, **tensors)
    ensemble = repository.text_model("tiny")
    sequence = ensemble.prepare("hello", sampling_params({"max_tokens": 24, **options}))
    expected = Stream(DeltaStream(ensemble.engine, sequence)).final().text
    assert of(answer, "text_output")[0, 0].decode() == expected
    [plain] = asked(repository, "tiny", text_input=text("hello"), max_tokens=length)
    assert of(plain, "text_output")[0, 0].decode() != expected


def test_an_unsupported_method_is_rejected_as_a_request_parameter(repository: Repository) -> None:
    with pytest.raises(GenserveError, match="contrastive search") as caught:
        asked(repository, "tiny", text_input=text("hello"), parameters={"penalty_alpha": 0.6})
    assert caught.value.field == "penalty_alpha"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": np.array([[0]], np.int32)}, "max_tokens"),
        ({"top_p": np.array([[2.0]], np.float32)}, "top_p"),
        ({"presence_penalty": np.array([[2.5]], np.float32)}, "presence_penalty"),
        ({"min_tokens": np.array([[9]], np.int32), "max_tokens": np.array([[4]], np.int32)}, "min_tokens"),
        ({"random_seed": np.array([[1]], np.uint64), "text_input": text("")}, "prompt"),
    ],
)
def test_a_bad_parameter_is_named(repository: Repository, options: dict, field: str) -> None:
    with pytest.raises(GenserveError) as caught:
        asked(repository, "tiny", **({"text_input": text("hello")} | options))
    assert caught.value.field == field


def test_the_tokenizer_stage_gives_ids(repository: Repository) -> None:
    [response] = asked(repository, "tiny_tokenizer", text_input=text("hello"))
    assert of(response, "input_ids").tolist() == [repository.text_model("tiny").tokenizer.encode("hello")]


def test_the_logits_stage_gives_those_after_the_last_token_of_each_row(repository: Repository) -> None:
    rows = np.array([[5, 6, 7, 0], [9, 8, 7, 6]], dtype=np.int64)
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=np.int64)
    [both] = asked(repository, "tiny_logits", input_ids=rows, attention_mask=mask)
    assert of(both, "logits").shape[:2] == (2, 1)
    for row, ids in enumerate(([5, 6, 7], [9, 8, 7, 6])):
        [alone] = asked(repository, "tiny_logits", input_ids=np.array([ids], dtype=np.int64))
        np.testing.assert_allclose(of(both, "logits")[row], of(alone, "logits")[0], atol=1e-4)


def test_invalid_ids_are_rejected(repository: Repository) -> None:
    with pytest.raises(GenserveError, match=str(10**9)):
        asked(repository, "tiny_logits", input_ids=np.array([[10**9]], dtype=np.int64))
    with pytest.raises(GenserveError, match="attention_mask"):
        asked(
            repository,
            "tiny_logits",
            input_ids=np.array([[1, 2]], dtype=np.int64),
            attention_mask=np.array([[1]], dtype=np.int64),
        )


def test_the_decoder_stage_names_the_model_to_ask(repository: Repository) -> None:
    with pytest.raises(InferenceError, match="'tiny'") as caught:
        asked(repository, "tiny_decoder", logits=np.zeros((1, 1, 1), np.float32))
    assert caught.value.status is Status.UNSUPPORTED


def test_a_plain_loop_computes_one_token_a_step_and_shares_steps(repository: Repository) -> None:
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11], [12, 13, 14, 15, 16]]
    expected = [greedy_ids(repository, prompt, count=12) for prompt in prompts]
    model = repository.text_model("tiny")
    before = model.engine.num_steps
    gate = StepGate(model)
    gate.shut()
    answers: dict[int, list[int]] = {}

    def run(number: int) -> None:
        ids = np.array([prompts[number]], dtype=np.int64)
        [response] = asked(repository, "loop", input_ids=ids)
        answers[number] = of(response, "output_ids").tolist()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    wait_until(lambda: model.engine.num_accepted == len(prompts))
    gate.remove()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(len(prompts))] == expected
    assert model.engine.num_steps - before < 4 * 12


def test_the_requests_of_a_loop_have_the_share_of_its_key(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = repository.text_model("tiny").engine
    shares = []

    def submit_logits(requests: list[LogitsRequest]) -> None:
        shares.extend(request.share for request in requests)
        EngineThread.submit_logits(engine, requests)

    monkeypatch.setattr(engine, "submit_logits", submit_logits)
    ids = np.array([[3, 4, 5]], dtype=np.int64)
    share = KeyShare("alice", 2.0)
    token = CURRENT_REQUEST.set(RequestContext(id="", key=share))
    try:
        asked(repository, "loop", input_ids=ids)
    finally:
        CURRENT_REQUEST.reset(token)
    asked(repository, "loop", input_ids=ids)
    assert shares == [share] * 12 + [NO_KEY] * 12


def test_executions_are_counted(repository: Repository) -> None:
    statistics = repository.find("tiny").statistics
    before = statistics.execution_count
    asked(repository, "tiny", text_input=text("hello"), max_tokens=np.array([[2]], np.int32))
    for _ in range(200):
        if statistics.execution_count == before + 1:
            break
        threading.Event().wait(0.01)
    assert statistics.execution_count == before + 1


def test_a_logits_stage_alone_has_an_engine_of_its_own(tiny_repository: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_repository / "tiny_logits", tmp_path / "alone")
    config = tmp_path / "alone" / "config.pbtxt"
    config.write_text(config.read_text().replace('"tiny_logits"', '"alone"'))
    repository = Repository([tmp_path])
    repository.start()
    [response] = asked(repository, "alone", input_ids=np.array([[1, 2, 3]], dtype=np.int64))
    assert of(response, "logits").shape[:2] == (1, 1)
    repository.close()


def test_a_decoder_that_is_edited_is_loaded_anew(tiny_repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_repository, root)
    options = RepositoryOptions(control_mode=ControlMode.EXPLICIT)
    repository = Repository([root], options=options)
    repository.start(["tiny"])
    before = repository.text_model("tiny")
    repository.load("tiny")
    assert repository.text_model("tiny") is before
    path = root / "tiny_decoder" / "1" / "model.py"
    path.write_text(path.read_text() + "# edited\n")
    repository.load("tiny_decoder")
    assert repository.text_model("tiny") is not before
    repository.close()


def test_a_stage_may_be_loaded_with_another_config_until_the_next_load(tiny_repository: Path) -> None:
    repository = Repository([tiny_repository], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny"])
    max_length = repository.text_model("tiny").max_length
    config = parse_message((tiny_repository / "tiny_logits" / "config.pbtxt").read_text())
    config.parameters["max_sequence_length"].string_value = "64"
    repository.load("tiny_logits", config=config_json(config))
    assert repository.text_model("tiny").max_length == 64
    assert repository.find("tiny_logits").config.parameters["max_sequence_length"] == "64"
    repository.load("tiny", config=config_json(repository.find("tiny").config.message))
    assert repository.text_model("tiny").max_length == max_length
    repository.close()


def test_a_config_that_breaks_the_text_model_is_rejected(tiny_repository: Path) -> None:
    repository = Repository([tiny_repository], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny"])
    before = repository.text_model("tiny")
    with pytest.raises(InferenceError, match="runs in a text engine"):
        repository.load("tiny_decoder", config='{"backend": "tokenizer"}')
    with pytest.raises(InferenceError, match="runs in a text engine"):
        repository.load("tiny_decoder", config='{"backend": "python"}', files={"1/model.py": b""})
    assert repository.text_model("tiny") is before
    repository.close()


def test_a_request_during_unload_is_rejected_as_closed(tiny_repository: Path) -> None:
    repository = Repository([tiny_repository])
    repository.start(["tiny"])
    served = repository.find("tiny")
    repository.close()
    request = InferenceRequest(model_name="tiny", inputs={"text_input": Tensor("text_input", text("x"))})
    with pytest.raises(Closed):
        served.runtime.submit(Inference(request=request, on_response=lambda response, final: None))
    assert served.num_waiting == 0


def test_a_stage_that_was_unloaded_comes_back(tiny_repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_repository, root)
    repository = Repository([root], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny"])
    repository.unload("tiny_logits")
    assert not repository.is_ready("tiny_logits")
    repository.load("tiny_logits")
    assert repository.is_ready("tiny_logits")
    [response] = asked(repository, "tiny_logits", input_ids=np.array([[1, 2, 3]], dtype=np.int64))
    assert of(response, "logits").shape[:2] == (1, 1)
    repository.close()


def test_an_ensemble_that_is_taken_away_takes_its_stages_along(tiny_repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    shutil.copytree(tiny_repository, root)
    options = RepositoryOptions(control_mode=ControlMode.POLL, poll_s=0.02)
    repository = Repository([root], options=options)
    repository.start()
    assert repository.state is ModelState.READY
    shutil.rmtree(root / "tiny")
    for _ in range(500):
        if not repository.is_ready("tiny"):
            break
        threading.Event().wait(0.01)
    for _ in range(500):
        if repository.state is ModelState.READY:
            break
        threading.Event().wait(0.01)
    assert not repository.is_ready("tiny")
    assert all(served.ready for served in repository.served)
    repository.close()


GATED_DECODER = """
class TritonPythonModel:
    async def decode(self, sequence):
        while not sequence.finished:
            token_id = await sequence.sample()
            if sequence.num_new_tokens == 0:
                open("{gate}").close()      # blocks until somebody opens its other end
            sequence.append(token_id)
"""


def test_a_reload_waits_for_streams_that_bypass_the_repository(
    tiny_repository: Path, tmp_path: Path
) -> None:
    root, gate = tmp_path / "models", tmp_path / "gate"
    shutil.copytree(tiny_repository, root)
    os.mkfifo(gate)
    (root / "tiny_decoder" / "1" / "model.py").write_text(GATED_DECODER.format(gate=gate))
    repository = Repository([root], options=RepositoryOptions(control_mode=ControlMode.EXPLICIT))
    repository.start(["tiny"])
    old = repository.text_model("tiny")
    sequence = old.prepare("hello", sampling_params({"max_tokens": 4, "ignore_eos": True}))
    with DeltaStream(old.engine, sequence) as stream:
        config = root / "tiny_decoder" / "config.pbtxt"
        config.write_text(config.read_text() + "# changed\n")
        repository.load("tiny")
        assert repository.text_model("tiny") is not old
        gate.open("w").close()
        assert Stream(stream).final().usage.completion_tokens == 4
    repository.close()


def test_the_decoder_is_the_file_that_its_config_names(tiny_repository: Path, tmp_path: Path) -> None:
    root = shutil.copytree(tiny_repository, tmp_path / "models")
    folder = root / "tiny_decoder"
    (folder / "1" / "model.py").rename(folder / "1" / "loop.py")
    with (folder / "config.pbtxt").open("a") as config:
        config.write('\ndefault_model_filename: "loop.py"\n')
    repository = Repository([root])
    try:
        repository.start(["tiny"])
        assert repository.errors == {}
        assert repository.text_model("tiny").name == "tiny"
    finally:
        repository.close()
