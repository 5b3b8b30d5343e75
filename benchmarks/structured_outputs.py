"""Structured outputs: how many answers to plain schemas come to an end, and their length, by JSON layout.

    python benchmarks/structured_outputs.py --model-repository model_repository --model smollm2 --rounds 10

asks for an example of each of 20 schemas with two fields, at temperature 0.7 and with at most 200 tokens,
once per round with new seeds. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from report import markdown

from genserve import LLM
from genserve.completion import Completion, FinishReason

MAX_TOKENS = 200
_TYPES = {"s": "string", "i": "integer", "n": "number", "b": "boolean"}
# Each schema has two fields, written with the first letter of their type.
SCHEMAS = [
    *("name:s age:i", "city:s rating:i", "title:s year:i", "product:s price:n", "country:s capital:s"),
    *("word:s count:i", "animal:s legs:i", "colour:s hex:s", "question:s answer:s", "author:s book:s"),
    *("language:s greeting:s", "task:s done:b", "first_name:s last_name:s", "sport:s players:i"),
    *("dish:s vegetarian:b", "planet:s moons:i", "company:s founded:i", "river:s length_km:n"),
    *("song:s artist:s", "subject:s grade:s"),
]
FORMS: Mapping[str, Mapping[str, Any]] = {
    "compact, the default": {},
    "no space at all": {"whitespace_pattern": ""},
    "any whitespace": {"disable_any_whitespace": False},
    "additional properties": {"disable_additional_properties": False},
    "both": {"disable_any_whitespace": False, "disable_additional_properties": False},
}
HEADINGS = ("form", "answers", "complete", "mean tokens", "median tokens of complete ones")
KEYS = ("answers", "complete", "mean_tokens", "median_complete_tokens")


def measure(llm: LLM, options: Mapping[str, Any], *, rounds: int) -> list[Completion]:
    """Return the answers to all schemas, in the layout that the options ask for."""
    with ThreadPoolExecutor(8) as callers:
        return list(callers.map(partial(_answer, llm, options), range(rounds * len(SCHEMAS))))


def _answer(llm: LLM, options: Mapping[str, Any], number: int) -> Completion:
    fields = dict(field.split(":") for field in SCHEMAS[number % len(SCHEMAS)].split())
    schema = {
        "type": "object",
        "properties": {name: {"type": _TYPES[kind]} for name, kind in fields.items()},
        "required": list(fields),
    }
    return llm.chat(
        f"Give an example of a {' and its '.join(fields)} as JSON.",
        structured_outputs={"json": schema, **options},
        temperature=0.7,
        seed=number,
        max_tokens=MAX_TOKENS,
    )


def summarise(answers: list[Completion]) -> dict[str, float]:
    """Return the figures of one layout."""
    lengths = [len(answer.token_ids) for answer in answers]
    ended = [len(one.token_ids) for one in answers if one.finish_reason is not FinishReason.LENGTH]
    median_ended = statistics.median(ended) if ended else 0.0
    return dict(zip(KEYS, (len(answers), len(ended), statistics.fmean(lengths), median_ended), strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", help="by default the only one")
    parser.add_argument("--rounds", type=int, default=1, help="answers to each schema")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    figures = {}
    with LLM(args.model, model_repository=args.model_repository) as llm:
        for name, options in FORMS.items():
            figures[name] = summarise(measure(llm, options, rounds=args.rounds))
    rows = [[name, *(f"{of[key]:.0f}" for key in KEYS)] for name, of in figures.items()]
    print(markdown(HEADINGS, rows))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
