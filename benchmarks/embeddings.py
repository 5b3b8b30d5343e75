"""Embeddings: texts per second of `/v1/embeddings`, beside a bare loop of ONNX Runtime and fastembed.

    genserve pull all-minilm-l6-v2 --model-repository REPOSITORY
    python benchmarks/embeddings.py --model-repository REPOSITORY --fastembed PYTHON

All sides run the same graph on the same texts, one request or batch after the other. The server answers over
HTTP, from a process of its own; the loop tokenizes, pads, runs the graph, pools and normalises in this
process; fastembed runs under a Python that has it. The sides are measured in turns, and a figure is that of
the fastest tenth of the runs, which other programs of the machine disturb least.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import onnxruntime
from servers import genserve_server
from tokenizers import Tokenizer

from genserve.backends.encoder import normalized, pool
from genserve.backends.onnx_session import register_kernels
from genserve.machine import num_cores

TEXT = "the sea is calm and a ship sails far from land under bright stars"
LONG_TOKENS = 128
BATCHES = (1, 32)
# After a run ONNX Runtime's threads spin for 36 ms by default; then the next side would be slower.
PAUSE_S = 0.06

# Reads lists of texts, one a line, and answers with the seconds that their vectors took.
FASTEMBED = """
import json, sys, time
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
TextEmbedding.add_custom_model(
    model="benchmark", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(url="none"), dim=384,
    model_file="model.onnx", additional_files=["model.onnx.data"],
)
model = TextEmbedding("benchmark", specific_model_path=sys.argv[1], threads=int(sys.argv[2]))
for line in sys.stdin:
    texts, begun = json.loads(line), time.perf_counter()
    vectors = list(model.embed(texts, batch_size=len(texts)))
    print(json.dumps([time.perf_counter() - begun, vectors[0].tolist()]), flush=True)
"""

# From texts to the seconds that they take, and the vector of the first.
Side = Callable[[Sequence[str]], tuple[float, Sequence[float]]]


def main() -> None:
    """Print the table."""
    options = _options()
    encoder = options.model_repository / f"{options.model}_encoder" / "1"
    files = options.model_repository / f"{options.model}_tokenizer" / "1"
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with ExitStack() as stack:
        server = stack.enter_context(genserve_server(options.model_repository))
        sides: dict[str, Side] = {
            "genserve": _server(server.http, options.model),
            "onnxruntime": _loop(encoder, tokenizer),
        }
        if options.fastembed:
            sides["fastembed"] = stack.enter_context(_fastembed(options.fastembed, encoder, files))
        print("texts/s" + "".join(f"{name:>14}" for name in sides) + "    genserve / onnxruntime")
        for length in ("short", "long"):
            for size in BATCHES:
                texts = _texts(size, tokenizer, is_long=length == "long")
                _print_row(f"{length} x {size}", sides, texts, seconds=options.seconds)


def _print_row(name: str, sides: dict[str, Side], texts: Sequence[str], *, seconds: float) -> None:
    vectors = [side(texts)[1] for side in sides.values()]      # and the first run
    assert np.allclose(vectors, vectors[0], atol=2e-3 if len(texts) == 1 else 2e-2), name
    taken: dict[str, list[float]] = {side: [] for side in sides}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken["genserve"]) < 5:
        for side, run in sides.items():
            time.sleep(PAUSE_S)
            taken[side].append(run(texts)[0])
    rates = {side: len(texts) / np.quantile(times, 0.1) for side, times in taken.items()}
    ratio = rates["genserve"] / rates["onnxruntime"]
    print(f"{name:10}" + "".join(f"{rate:14.0f}" for rate in rates.values()) + f"    {ratio:.2f}", flush=True)


def _texts(count: int, tokenizer: Tokenizer, *, is_long: bool) -> list[str]:
    """Return texts of 10 words each, or of 128 tokens."""
    texts, known = [], TEXT.split()
    for index in range(count):
        words = [known[(index + place) % len(known)] for place in range(LONG_TOKENS if is_long else 10)]
        while len(tokenizer.encode(" ".join(words))) > LONG_TOKENS:
            words.pop()
        texts.append(" ".join(words))
    return texts


def _server(port: int, model: str) -> Side:
    connection = HTTPConnection("127.0.0.1", port)

    def run(texts: Sequence[str]) -> tuple[float, Sequence[float]]:
        body = json.dumps({"model": model, "input": [*texts], "encoding_format": "float"})
        begun = time.perf_counter()
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        answer = connection.getresponse().read()
        return time.perf_counter() - begun, json.loads(answer)["data"][0]["embedding"]

    return run


def _loop(encoder: Path, tokenizer: Tokenizer) -> Side:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_cores()
    # The server has the cores between two runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    register_kernels(options)       # for a graph in int8
    session = onnxruntime.InferenceSession(str(encoder / "model.onnx"), options)
    names = [one.name for one in session.get_inputs()]

    def run(texts: Sequence[str]) -> tuple[float, Sequence[float]]:
        begun = time.perf_counter()
        encoded = tokenizer.encode_batch_fast([*texts])
        shape = len(texts), max(map(len, encoded))
        arrays = {name: np.zeros(shape, np.int64) for name in names}
        for row, one in enumerate(encoded):
            arrays["input_ids"][row, : len(one)] = one.ids
            arrays["attention_mask"][row, : len(one)] = 1
        [hidden] = session.run(None, arrays)
        vectors = normalized(pool(hidden, arrays["attention_mask"], "mean"))
        return time.perf_counter() - begun, vectors[0].tolist()

    return run


@contextmanager
def _fastembed(python: str, encoder: Path, files: Path) -> Iterator[Side]:
    with tempfile.TemporaryDirectory() as folder:
        for file in (*encoder.glob("model.onnx*"), *files.iterdir()):
            shutil.copy(file, folder)
        (Path(folder) / "config.json").write_text('{"pad_token_id": 0}')
        command = [python, "-c", FASTEMBED, folder, str(num_cores())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            source, sink = process.stdin, process.stdout
            assert source is not None
            assert sink is not None

            def run(texts: Sequence[str]) -> tuple[float, Sequence[float]]:
                print(json.dumps([*texts]), file=source, flush=True)
                seconds, vector = json.loads(sink.readline())
                return seconds, vector

            yield run
            source.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--fastembed", default="", metavar="PYTHON", help="a Python that has fastembed")
    parser.add_argument("--seconds", type=float, default=8, help="for each row of the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
