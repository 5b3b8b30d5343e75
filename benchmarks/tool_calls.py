"""Tool calls: whether required calls match generated schemas, and are the same when streamed.

    python benchmarks/tool_calls.py --model-repository model_repository --requests 500

loads the model and sends requests that ask for a call, each with one to four tools whose schemas are
generated: strings, numbers, integers with ranges, enums, booleans, arrays, nested objects, optional fields
and `$ref`. Temperature is 1 and `tool_choice` "required"; without `--max-tokens`, answers may fill the
context. An answer that ends for length was brought to its end before the tokens ran out. Each request is sent
whole and streamed, with one seed. Prints a table in Markdown, and the calls that did not match.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from report import markdown

from genserve import LLM
from genserve.completion import Completion

FIELDS = (
    *("name", "city", "query", "email", "date", "amount", "price", "count", "priority", "status", "unit"),
    *("tags", "items", "language", "latitude", "note", "address", "currency", "user_id", "limit"),
)
VERBS = ("get", "set", "search", "create", "update", "delete", "send", "list", "book", "convert")
NOUNS = ("weather", "order", "email", "flight", "user", "invoice", "file", "event", "task", "price")
HEADINGS = (
    *("requests", "validate", "end for length", "same when streamed", "calls"),
    *("median tokens", "most tokens", "seconds"),
)


def generated_tools(draw: random.Random) -> list[dict[str, Any]]:
    """Return one to four tools, in OpenAI's JSON."""
    names = draw.sample([f"{verb}_{noun}" for verb in VERBS for noun in NOUNS], draw.randint(1, 4))
    return [{"type": "function", "function": _function(draw, name)} for name in names]


def _function(draw: random.Random, name: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    parameters = _object(draw, depth=2, definitions=definitions)
    if definitions:
        parameters["$defs"] = definitions
    return {"name": name, "description": name.replace("_", " ").capitalize() + ".", "parameters": parameters}


def _object(draw: random.Random, *, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = draw.sample(FIELDS, draw.randint(1, 4))
    properties = {name: _value(draw, depth=depth, definitions=definitions) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required}


def _value(draw: random.Random, *, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = ["string", "string", "described", "number", "range", "enum", "boolean"]
    kinds += ["array", "object", "reference"] if depth else []
    match draw.choice(kinds):
        case "string":
            return {"type": "string"}
        case "described":
            return {"type": "string", "description": "A short text.", "minLength": 1}
        case "number":
            return {"type": "number"}
        case "range":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)}
        case "enum":
            return {"type": "string", "enum": draw.sample(["low", "high", "open", "closed", "EUR", "m/s"], 3)}
        case "boolean":
            return {"type": "boolean"}
        case "array":
            return {"type": "array", "items": _value(draw, depth=0, definitions=definitions)}
        case "object":
            return _object(draw, depth=depth - 1, definitions=definitions)
    name = f"Part{len(definitions)}"
    definitions[name] = {}
    definitions[name] = _object(draw, depth=0, definitions=definitions)
    return {"$ref": f"#/$defs/{name}"}


def problems(tools: Sequence[dict[str, Any]], answer: Completion) -> list[str]:
    """Return what is wrong with the calls of an answer."""
    found = [] if answer.tool_calls else ["no call"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in answer.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            found.append(f"{answer.finish_reason}: {call.arguments[-80:]!r} is not JSON")
            continue
        errors = Draft202012Validator(schemas[call.name]).iter_errors(arguments)
        found += [f"{call.name}: {error.message}" for error in errors]
    return found


def _ask(llm: LLM, options: dict[str, Any], number: int) -> tuple[list[str], bool, Completion]:
    """Return the problems of an answer, whether it is the same when streamed, and the answer."""
    draw = random.Random(number)
    tools = generated_tools(draw)
    wish = draw.choice(tools)["function"]["name"].replace("_", " ")
    request = {"tools": tools, "tool_choice": "required", "temperature": 1.0, "seed": number, **options}
    whole = llm.chat(f"Please {wish} for me.", **request)
    streamed = llm.chat_stream(f"Please {wish} for me.", **request).final()
    called = [[(call.name, call.arguments) for call in answer.tool_calls] for answer in (whole, streamed)]
    return problems(tools, whole), called[0] == called[1], whole


def measure(llm: LLM, options: dict[str, Any], *, requests: int, concurrency: int) -> dict[str, Any]:
    """Return the figures of all requests, and the calls that did not match."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(concurrency) as callers:
        asked = list(callers.map(partial(_ask, llm, options), range(requests)))
    lengths = [len(answer.token_ids) for *_, answer in asked]
    return {
        "requests": requests,
        "validate": sum(not found for found, *_ in asked),
        "cut": Counter(answer.finish_reason for *_, answer in asked)["length"],
        "agree": sum(agrees for _, agrees, _ in asked),
        "calls": sum(len(answer.tool_calls) for *_, answer in asked),
        "median_tokens": statistics.median(lengths),
        "max_tokens": max(lengths),
        "seconds": time.monotonic() - begun_s,
        "problems": [f"request {i}: {one}" for i, (found, *_) in enumerate(asked) for one in found],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, required=True)
    parser.add_argument("--model", help="by default the only one")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, help="of each answer; by default what the context holds")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    options = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    with LLM(args.model, model_repository=args.model_repository) as llm:
        figures = measure(llm, options, requests=args.requests, concurrency=args.concurrency)
    row = [f"{value:.0f}" for name, value in figures.items() if name != "problems"]
    print(markdown(HEADINGS, [row]))
    print("\n".join(figures["problems"]))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
