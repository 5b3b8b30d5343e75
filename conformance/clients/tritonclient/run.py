"""tritonclient: NVIDIA's client of KServe v2, over HTTP."""

import numpy as np
import tritonclient.http as triton
from rows import MODEL, URL, expect, main, row
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(URL.removeprefix("http://"), concurrency=4)
TOKENIZER, LOGITS, DECODER = (f"{MODEL}_{stage}" for stage in ("tokenizer", "logits", "decoder"))


def tensor(name, array, kind, *, binary=True):
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def texts(*values):
    return np.array([[value.encode()] for value in values], dtype=object)


def token_ids(*values, binary=True):
    given = [tensor("text_input", texts(*values), "BYTES", binary=binary)]
    return client.infer(TOKENIZER, given).as_numpy("input_ids")


@row("health")
def health():
    expect(client.is_server_live() and client.is_server_ready(), "the server is not ready")
    expect(client.is_model_ready(MODEL) and client.is_model_ready(MODEL, "1"), "the model is not ready")
    expect(not client.is_model_ready("other"), "a model that does not exist is ready")


@row("metadata")
def metadata():
    expect("binary_tensor_data" in client.get_server_metadata()["extensions"], "no binary tensors")
    inputs = [one["name"] for one in client.get_model_metadata(MODEL)["inputs"]]
    expect("text_input" in inputs and "max_tokens" in inputs, f"{inputs}")


@row("config")
def config():
    steps = client.get_model_config(MODEL)["ensemble_scheduling"]["step"]
    expect([one["model_name"] for one in steps] == [TOKENIZER, LOGITS, DECODER], f"{steps}")


@row("repository index")
def index():
    states = {one["name"]: one.get("state") for one in client.get_model_repository_index()}
    expect({states[name] for name in (MODEL, TOKENIZER, LOGITS, DECODER)} == {"READY"}, f"{states}")


@row("infer, binary tensors")
def infer_binary():
    expect(token_ids("The sea is").shape[0] == 1, "no token ids")


@row("infer, JSON tensors")
def infer_json():
    expect((token_ids("The sea is", binary=False) == token_ids("The sea is")).all(), "other token ids")


@row("infer, a batch")
def infer_batch():
    expect(token_ids("The sea is", "The sea is").shape[0] == 2, "not two rows")


@row("infer, compressed")
def infer_compressed():
    given = [tensor("text_input", texts("The sea is"), "BYTES")]
    answer = client.infer(
        TOKENIZER, given, request_compression_algorithm="gzip", response_compression_algorithm="deflate"
    )
    expect((answer.as_numpy("input_ids") == token_ids("The sea is")).all(), "other token ids")


@row("infer, concurrently")
def infer_concurrently():
    given = [tensor("text_input", texts("The sea is"), "BYTES")]
    answers = [client.async_infer(TOKENIZER, given) for _ in range(16)]
    expect(len({answer.get_result().as_numpy("input_ids").tobytes() for answer in answers}) == 1, "differ")


@row("infer, logits")
def infer_logits():
    ids = token_ids("The sea is")
    output = client.infer(LOGITS, [tensor("input_ids", ids.astype(np.int64), "INT64")]).as_numpy("logits")
    expect(output.dtype == np.float32 and output.shape[:2] == (1, 1), f"{output.dtype} {output.shape}")


@row("infer, top classes")
def infer_classes():
    ids = tensor("input_ids", token_ids("The sea is").astype(np.int64), "INT64")
    wanted = [triton.InferRequestedOutput("logits", class_count=3)]
    found = client.infer(LOGITS, [ids], outputs=wanted).as_numpy("logits")
    expect(found.size == 3, f"{found}")


@row("statistics")
def statistics():
    def count():
        [stats] = client.get_inference_statistics(LOGITS)["model_stats"]
        return stats["inference_stats"]["success"]["count"]

    before = count()
    infer_logits()
    expect(count() == before + 1, f"{count()} after {before}")


@row("errors")
def errors():
    for model, given in (
        ("other", []),
        (MODEL, [tensor("text_input", texts("x"), "BYTES")]),   # decoupled: not over HTTP's infer
        (TOKENIZER, []),
        (DECODER, [tensor("text_input", texts("x"), "BYTES")]),
    ):
        try:
            client.infer(model, given)
        except InferenceServerException as error:
            expect(error.status() and error.message(), f"{error!r}")
        else:
            expect(condition=False, detail=f"{model} answered")


main()
