"""Speculation: tokens per second with and without prompt lookup, and whether the texts are the same.

    python benchmarks/speculation.py --model-repository model_repository --model smollm2

loads the model twice, with its own config and with `speculation: "prompt_lookup"`, and sends the same
requests to both alternately: editing a text, summarising it, and a story, which repeats nothing, at several
concurrencies. Prints a table of medians in Markdown. A ratio is the median of the ratios within the rounds,
whose two sides were measured within the same seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from report import Figures, markdown, median, ratio

from genserve import LLM

TEXT = """\
The old lighthouse stands at the end of a narrow road, two miles behind the harbour. It was built in 1862 by
the brothers Amos and Peter Hale, who cut the stone from the cliff below it. For ninety years a keeper lived
there with his family, and the lamp was lit each evening with oil that was carried up the stairs by hand. In
1951 the lamp was changed for an electric one, and the last keeper, Thomas Reed, moved into the village.
Today the lighthouse is a small museum. Visitors can climb the one hundred and twelve steps to the top,
where the old lamp still stands behind its glass, and look over the bay.""".replace("\n", " ")
TASKS = {
    "edit": f"Rewrite this text, with the name Samuel in the place of Peter:\n\n{TEXT}",
    "summarise": f"Summarise this text in a few sentences, in its own words:\n\n{TEXT}",
    "story": "Tell me a story of a fox who learns to swim.",
}
HEADINGS = ("task, concurrency", "plain, tokens/s", "prompt lookup", "ratio", "tokens per step", "same texts")


class Answers(NamedTuple):
    """The answers of one model to all requests of a round."""

    texts: list[str]
    num_tokens: int
    num_steps: int      # steps, including prefills and idle sequences
    seconds: float


def main() -> None:
    options = _options()
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with_drafts = _with_prompt_lookup(options.model_repository, Path(folder), options.model)
        with (
            LLM(options.model, model_repository=options.model_repository) as plain,
            LLM(options.model, model_repository=with_drafts) as drafting,
        ):
            for concurrency in options.concurrency:
                for task in options.tasks:
                    name = f"{task}, {concurrency}"
                    tables[name] = _measure(plain, drafting, TASKS[task], concurrency, options)
    print(markdown(HEADINGS, [_row(name, table) for name, table in tables.items()]))
    if options.json:
        options.json.write_text(json.dumps(tables, indent=2))


def _measure(
    plain: LLM, drafting: LLM, prompt: str, concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure both alternately, after a warm-up round. Concurrent prompts begin with their numbers."""
    prompts = [f"{number}. {prompt}" if number else prompt for number in range(concurrency)]
    same, rounds = True, []
    for number in range(options.rounds + 1):
        pair = (plain, drafting) if number % 2 else (drafting, plain)
        answers = {llm: _ask(llm, prompts, options) for llm in pair}
        same = same and answers[plain].texts == answers[drafting].texts
        rounds.append([_figures(answers[llm]) for llm in (plain, drafting)])
    measured = {"plain": [p for p, _ in rounds[1:]], "drafting": [d for _, d in rounds[1:]]}
    return measured | {"same": same, "texts": answers[plain].texts}


def _figures(answers: Answers) -> Figures:
    per_step = answers.num_tokens / answers.num_steps
    return {"tokens_per_s": answers.num_tokens / answers.seconds, "tokens_per_step": per_step}


def _ask(llm: LLM, prompts: list[str], options: argparse.Namespace) -> Answers:
    settings = {"max_tokens": options.new_tokens, "temperature": options.temperature, "seed": 0}
    with ThreadPoolExecutor(len(prompts)) as threads:
        started_s, steps = time.perf_counter(), llm._model.engine.num_steps
        done = list(threads.map(lambda prompt: llm.chat(prompt, **settings), prompts))
        seconds = time.perf_counter() - started_s
    return Answers(
        texts=[d.text for d in done],
        num_tokens=sum(d.usage.completion_tokens for d in done),
        num_steps=llm._model.engine.num_steps - steps,
        seconds=seconds,
    )


def _with_prompt_lookup(repository: Path, folder: Path, model: str) -> Path:
    """Return a copy of the repository whose logits stage speculates."""
    copy = folder / "models"
    shutil.copytree(repository, copy)
    config = copy / f"{model}_logits" / "config.pbtxt"
    parameter = 'parameters [ { key: "speculation" value { string_value: "prompt_lookup" } } ]\n'
    config.write_text(f"{config.read_text()}\n{parameter}")
    return copy


def _row(name: str, table: dict[str, Any]) -> list[str]:
    plain, drafting = table["plain"], table["drafting"]
    return [
        name,
        f"{median(plain, 'tokens_per_s'):.1f}",
        f"{median(drafting, 'tokens_per_s'):.1f}",
        f"x{ratio(drafting, plain, 'tokens_per_s'):.2f}",
        f"{median(drafting, 'tokens_per_step'):.2f}",
        "yes" if table["same"] else "NO",
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
