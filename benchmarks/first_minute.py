"""First minute: the answers that a new user gets from the default model with the defaults of `genserve chat`.

    python benchmarks/first_minute.py --texts answers.md

asks 20 common questions, each followed by two more in the same chat, with 10 seeds: with the options of
`genserve chat`, with the options that SmolLM2's authors recommend for transformers (temperature 0.2, top_p
0.9), and with the former options of `genserve chat` (temperature 0.7). The token limit and the loop detector
are the same. `--options 'NAME={...}'` adds options to compare. Prints a table in Markdown: how many first and
later answers ran into the loop detector or the token limit, how long they are, and how much of their text
repeats itself (the share of sequences of 8 words that occurred before in the answer). `--texts` writes all
answers to a file.

    python benchmarks/first_minute.py --turns 1 --seeds 32 --ask "What is the capital of Japan?"

asks another question. The question about Japan is the first example of the documentation and of the chat
page: all 32 answers with the options of `genserve chat` are right. For France, 7 of 16 are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import markdown

from genserve import LLM
from genserve.completion import Completion, FinishReason
from genserve.prompt import Message
from genserve.sampling.defaults import chat_sampling_params

QUESTIONS = (
    "Hello, who are you?",
    "What can you do?",
    "What is the capital of France?",
    "Why is the sky blue?",
    "Explain photosynthesis to a ten year old.",
    "Write a haiku about the sea.",
    "Tell me a joke.",
    "Tell me a short story about a dragon.",
    "Write a Python function that reverses a string.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three tips for a good night's sleep.",
    "How do I make pancakes?",
    "What should I see on a weekend in Rome?",
    "Write a polite email to my boss asking for a day off.",
    "Translate 'good morning, my friend' into Spanish.",
    "What is 17 times 3?",
    "Who wrote Romeo and Juliet?",
    "Summarise the plot of Cinderella.",
    "What are the pros and cons of working from home?",
    "List the planets of the solar system.",
)
FOLLOWING = ("Tell me more about that.", "Give me an example.")
AUTHORS = {"temperature": 0.2, "top_p": 0.9}
FORMER = {"temperature": 0.7}
HEADINGS = (
    *("options", "answers", "loops", "at the limit", "median tokens", "most tokens", "repeated", "seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of a chat."""

    question: str
    seed: int
    turn: int                   # 0: the first question
    completion: Completion

    @property
    def repeated(self) -> float:
        """The share of sequences of 8 words that occurred before in the answer."""
        words = self.completion.text.split()
        runs = [tuple(words[at : at + 8]) for at in range(len(words) - 7)]
        return 1 - len(set(runs)) / len(runs) if runs else 0.0


def main() -> None:
    options = _options()
    rows, texts = [], []
    with LLM(options.model, model_repository=options.model_repository) as llm:
        for name, sampling in _compared(llm, options).items():
            print(f"{name}: {json.dumps(sampling)}", flush=True)
            started_s = time.perf_counter()
            answers = _ask_all(llm, sampling, options=options)
            rows += _rows(name, answers, seconds=time.perf_counter() - started_s)
            texts.append(_texts(name, answers))
            if options.texts:   # write after each answer, since all together take long
                options.texts.write_text("\n".join(texts), encoding="utf-8")
    print(f"\n{markdown(HEADINGS, rows)}")
    if options.json:
        options.json.write_text(json.dumps([dict(zip(HEADINGS, row, strict=True)) for row in rows], indent=2))


def _compared(llm: LLM, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the sampling options to compare, by name; all end answers as `genserve chat` does."""
    own = {**chat_sampling_params(llm.default_sampling_params), "max_tokens": options.max_tokens}
    ends = {name: own[name] for name in ("max_tokens", "repetition_detection")}
    compared = {"genserve chat": own, "authors": ends | AUTHORS, "before": ends | FORMER}
    compared |= {name: ends | more for name, more in options.options}
    return {name: compared[name] for name in options.only or compared}


def _ask_all(llm: LLM, sampling: Mapping[str, Any], *, options: argparse.Namespace) -> list[Answer]:
    seeds = range(1, options.seeds + 1)
    asked = options.ask or QUESTIONS[: options.questions]
    chats = [(question, seed) for question in asked for seed in seeds]
    with ThreadPoolExecutor(options.concurrency) as pool:
        of_chats = pool.map(lambda chat: _chat(llm, *chat, sampling=sampling, turns=options.turns), chats)
        return [answer for answers in of_chats for answer in answers]


def _chat(llm: LLM, question: str, seed: int, *, sampling: Mapping[str, Any], turns: int) -> list[Answer]:
    """Ask a question, and the following ones in the same chat."""
    answers: list[Answer] = []
    messages: list[Message] = []
    for turn, asked in enumerate((question, *FOLLOWING)[:turns]):
        messages.append(Message(role="user", content=asked))
        completion = llm.chat(messages, **{**sampling, "seed": seed + turn})
        messages.append(Message(role="assistant", content=completion.text))
        answers.append(Answer(question=question, seed=seed, turn=turn, completion=completion))
    return answers


def _rows(name: str, answers: Sequence[Answer], *, seconds: float) -> list[tuple[str, ...]]:
    first = [answer for answer in answers if answer.turn == 0]
    later = [answer for answer in answers if answer.turn > 0]
    parts = ((name, first), (f"{name}, later", later))
    return [_row(title, part, seconds=seconds) for title, part in parts if part]


def _row(title: str, answers: Sequence[Answer], *, seconds: float) -> tuple[str, ...]:
    reasons = [answer.completion.finish_reason for answer in answers]
    tokens = [answer.completion.usage.completion_tokens for answer in answers]
    return (
        title,
        str(len(answers)),
        f"{reasons.count(FinishReason.REPETITION) / len(answers):.1%}",
        f"{reasons.count(FinishReason.LENGTH) / len(answers):.1%}",
        f"{statistics.median(tokens):.0f}",
        str(max(tokens)),
        f"{statistics.mean(answer.repeated for answer in answers):.1%}",
        f"{seconds:.0f}",
    )


def _texts(name: str, answers: Sequence[Answer]) -> str:
    parts = [f"# {name}\n"]
    for answer in answers:
        asked = answer.question if answer.turn == 0 else FOLLOWING[answer.turn - 1]
        ended = answer.completion.finish_reason.value
        parts.append(f"## {asked} (seed {answer.seed}, question {answer.turn + 1}, {ended})\n")
        parts.append(f"{answer.completion.text}\n")
    return "\n".join(parts)


def _named_options(text: str) -> tuple[str, dict[str, Any]]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--model-repository", type=Path, help="default: the store")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="ask only the first ones")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="instead of these; repeatable")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--turns", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--options", type=_named_options, action="append", default=[], help="NAME={JSON}")
    parser.add_argument("--only", action="append", help="measure only the options of this name; repeatable")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--texts", type=Path, help="write the answers to this file")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
