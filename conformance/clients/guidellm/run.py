"""guidellm: the load generator of the vLLM project, over its request formats and profiles."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rows import MODEL, TOKENIZER, URL, expect, main, row

NUM_REQUESTS, NUM_TOKENS = 4, 16


def benchmark(profile="kind=synchronous", **backend):
    """Run a benchmark; every request must succeed, with as many tokens as asked for."""
    fields = {"kind": "openai_http", "target": URL, "model": MODEL} | backend
    with TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run",
            "--backend", ",".join(f"{name}={value}" for name, value in fields.items()),
            "--profile", profile,
            "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
            "--output", f"kind=json,path={folder}/report.json", "--disable-console",
        ]  # fmt: skip
        offline = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        expect(done.returncode == 0, f"exit status {done.returncode}")
        [measured, *_] = json.loads((Path(folder) / "report.json").read_text())["benchmarks"]
    requests = measured["requests"]
    failed = [request["info"].get("error") for request in requests["errored"]]
    expect(not failed, f"{len(failed)} requests failed: {failed[:1]}")
    done, cut = len(requests["successful"]), len(requests["incomplete"])
    # guidellm cancels running requests when it has enough answers.
    expect(done and done + cut >= NUM_REQUESTS, f"{done} requests succeeded, {cut} were cut off")
    counts = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
    expect(counts == {NUM_TOKENS}, f"the answers have {counts} tokens")


@row("chat completions")
def chat():
    benchmark(request_format="/v1/chat/completions")


@row("completions")
def completions():
    benchmark(request_format="/v1/completions")


@row("responses")
def responses():
    benchmark(request_format="/v1/responses")


@row("not streamed")
def whole():
    benchmark(request_format="/v1/chat/completions", stream="false")


@row("concurrent")
def concurrent():
    benchmark("kind=concurrent,streams=2")


@row("throughput")
def throughput():
    benchmark("kind=throughput,max_concurrency=4")


@row("constant rate")
def constant():
    benchmark("kind=constant,rate=20")


main()
