"""aiperf: NVIDIA's load generator, the successor of genai-perf."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rows import MODEL, TOKENIZER, URL, expect, main, row

NUM_REQUESTS, NUM_TOKENS = 8, 16


def profile(endpoint, *options):
    """Run a benchmark and return its report; every request must succeed."""
    with TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).with_name("aiperf")), "profile", f"--model={MODEL}", f"--url={URL}",
            f"--endpoint-type={endpoint}", f"--tokenizer={TOKENIZER}", f"--request-count={NUM_REQUESTS}",
            "--concurrency=2", "--synthetic-input-tokens-mean=32", f"--output-tokens-mean={NUM_TOKENS}",
            "--extra-inputs=ignore_eos:true", "--ui=none", "--no-gpu-telemetry", f"--artifact-dir={folder}",
            *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        expect(done.returncode == 0, f"exit status {done.returncode}")
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    count = report["request_count"]["avg"]
    expect(count == NUM_REQUESTS, f"{count} of {NUM_REQUESTS} requests succeeded")
    return report


def check_streamed(report):
    first, whole = (report[name]["avg"] for name in ("time_to_first_token", "request_latency"))
    expect(0 < first < whole, f"the first token comes after {first} ms of {whole} ms")
    return f"first token {first:.0f} ms of {whole:.0f} ms"


@row("chat, streamed")
def chat_streamed():
    return check_streamed(profile("chat", "--streaming"))


@row("chat")
def chat():
    profile("chat")


@row("completions, streamed")
def completions_streamed():
    return check_streamed(profile("completions", "--streaming"))


@row("token counts of the server")
def server_token_counts():
    report = profile("chat", "--streaming", "--use-server-token-count")
    length = report["output_sequence_length"]["avg"]
    expect(length == NUM_TOKENS, f"an answer has {length} tokens instead of {NUM_TOKENS}")


main()
