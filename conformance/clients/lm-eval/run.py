"""lm-eval: EleutherAI's evaluation harness, with the tokenizer of the server."""

import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.utils import RemoteTokenizer
from rows import MODEL, URL, expect, main, row

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " Oslo"], "answer": 0},
    {"question": "Two and two make", "choices": [" nine", " four", " fish"], "answer": 1},
]


def evaluate(model, task, **arguments):
    """Run one task over the questions and return its results."""
    with TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        files = {"data_files": {"test": str(data)}}
        config = {"task": "questions", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        options = {"model": MODEL, "num_concurrent": 2, "max_retries": 1} | arguments
        return lm_eval.simple_evaluate(
            model=model, model_args=options, tasks=[config | task], bootstrap_iters=0,
            apply_chat_template="chat" in model,
        )  # fmt: skip


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}
COMPLETIONS = f"{URL}/v1/completions"


@row("remote tokenizer")
def remote_tokenizer():
    tokenizer = RemoteTokenizer(base_url=URL)
    ids = tokenizer.encode("The sea is")
    expect(tokenizer.decode(ids) == "The sea is", f"{ids} decode to {tokenizer.decode(ids)!r}")
    expect(tokenizer.eos_token, "no eos_token")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    expect("Hello" in rendered, f"the template renders {rendered!r}")


@row("local-completions, log-likelihoods, remote tokenizer")
def loglikelihood():
    found = evaluate("local-completions", CHOICE, base_url=COMPLETIONS, tokenizer_backend="remote")
    expect(0 <= found["results"]["questions"]["acc,none"] <= 1, f"the results are {found['results']}")
    samples = found["samples"]["questions"]
    scores = [float(score) for sample in samples for [score, _] in sample["filtered_resps"]]
    expect(scores and all(math.isfinite(score) and score <= 0 for score in scores), f"scores: {scores}")


@row("local-completions, generated, remote tokenizer")
def generated():
    found = evaluate("local-completions", GENERATE, base_url=COMPLETIONS, tokenizer_backend="remote")
    answers = [sample["resps"][0][0] for sample in found["samples"]["questions"]]
    expect(all(answers), f"the answers are {answers}")


@row("local-chat-completions, generated")
def chat_generated():
    found = evaluate("local-chat-completions", GENERATE, base_url=f"{URL}/v1/chat/completions")
    answers = [sample["resps"][0][0] for sample in found["samples"]["questions"]]
    expect(all(answers), f"the answers are {answers}")


main()
