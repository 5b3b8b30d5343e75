"""Datasets: make the prompts of a load from random words or a file, and count their tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import orjson

from genserve.errors import InvalidRequest, Unreachable

TokenCounter: TypeAlias = Callable[[str], int]      # counts a text without special tokens around it

DEFAULT_OUTPUT_LEN = 128
_WORDS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city community
    name
"""
# The filter of vLLM's benchmark: shorter and longer conversations are left out.
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOTAL_TOKENS = 4, 1024, 2048
# An estimate for English, if there is no token counter.
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """The content of one request."""

    text: str
    max_tokens: int
    messages: Sequence[Any] = ()        # a chat; empty: the text is its only message
    fields: Mapping[str, Any] = field(default_factory=dict)     # additional fields of the body


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Prompts of random words."""

    input_len: int                      # tokens, with the prefix
    output_len: int
    prefix_len: int = 0                 # tokens at the beginning that all prompts share
    range_ratio: float = 0.0            # lengths are drawn from [length * (1 - ratio), length * (1 + ratio)]


def random_prompts(count: int, *, words: int, shared_words: int = 0, seed: int) -> list[str]:
    """Return `count` texts of random words; the first `shared_words` are the same in all texts."""
    lengths = RandomLengths(input_len=words, prefix_len=shared_words, output_len=1)
    return [prompt.text for prompt in itertools.islice(random_dataset(lengths, seed=seed), count)]


def random_dataset(
    lengths: RandomLengths, *, seed: int, counter: TokenCounter | None = None
) -> Iterator[BenchPrompt]:
    """Yield prompts without end.

    The prompts have exactly as many tokens as `lengths` says if the tokenizer has words of one token, as
    usual, and otherwise at most as many. Without a counter, each word counts as one token.
    """
    # Most tokenizers split text at blanks, so that a text has the tokens of its words.
    sizes = {
        word: max(1, counter(f"{word} {word} {word} {word}") // 4) if counter else 1
        for word in _WORDS.split()
    }
    return _random_prompts(lengths, sizes, random.Random(seed))


def _random_prompts(
    lengths: RandomLengths, sizes: Mapping[str, int], rng: random.Random
) -> Iterator[BenchPrompt]:
    shared = _random_words(lengths.prefix_len, sizes, rng)
    while True:
        own_len = max(1, _drawn(lengths.input_len, lengths, rng) - lengths.prefix_len)
        text = " ".join(shared + _random_words(own_len, sizes, rng))
        yield BenchPrompt(text=text, max_tokens=max(1, _drawn(lengths.output_len, lengths, rng)))


def _drawn(length: int, lengths: RandomLengths, rng: random.Random) -> int:
    ratio = lengths.range_ratio
    return rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio)))


def _random_words(num_tokens: int, sizes: Mapping[str, int], rng: random.Random) -> list[str]:
    """Return words with `num_tokens` in total, or fewer if no further word fits; at least one word."""
    words, largest, left = list(sizes), max(sizes.values()), num_tokens
    chosen: list[str] = []
    while left > 0:
        fitting = words if left >= largest else [word for word in words if sizes[word] <= left]
        if not (fitting or not chosen):
            break
        chosen.append(rng.choice(fitting or words))
        left -= sizes[chosen[-1]]
    return chosen


def read_dataset(
    path: Path, *, output_len: int | None, counter: TokenCounter | None = None
) -> list[BenchPrompt]:
    """Read the prompts of a file, in the order of the file.

    The suffix decides the format: `.json` is ShareGPT's list of conversations, `.jsonl` has a JSON object or
    string per line, any other file a prompt per line.

    Args:
        path: the file.
        output_len: the new tokens of each answer; None: the number in the file, or the length of the next
            answer in the conversation, or `DEFAULT_OUTPUT_LEN`.
        counter: counts the tokens of conversations; None: the number is estimated.

    Raises:
        InvalidRequest: the file cannot be read, or has no prompt.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="dataset_path") from error
    match path.suffix:
        case ".json":
            prompts = list(_conversations(path, content, output_len=output_len, counter=counter))
        case ".jsonl":
            prompts = [
                _line_prompt(line, output_len=output_len, place=f"{path}:{number}")
                for number, line in enumerate(content.splitlines(), start=1)
                if line.strip()
            ]
        case _:
            lines = filter(str.strip, content.decode(errors="replace").splitlines())
            max_tokens = output_len or DEFAULT_OUTPUT_LEN
            prompts = [BenchPrompt(text=line, max_tokens=max_tokens) for line in lines]
    if not prompts:
        raise InvalidRequest(f"{path} has no prompt", field="dataset_path")
    return prompts


def _line_prompt(line: bytes, *, output_len: int | None, place: str) -> BenchPrompt:
    """Read a line of a JSONL file.

    The line is a prompt as a string; or an object with `prompt` or `messages`, `output_tokens` or
    `max_tokens`, and any other field of a body; or a line of OpenAI's batch files, with such an object as
    `body`; or an object with `inputs`, a body for KServe's infer.
    """
    document = _parsed(line, place=place)
    if isinstance(document, str):
        document = {"prompt": document}
    if isinstance(document, dict) and isinstance(document.get("body"), dict):
        document = document["body"]
    if not isinstance(document, dict) or not document.keys() & {"prompt", "messages", "inputs"}:
        raise InvalidRequest(f"{place} has no prompt, messages or inputs", field="dataset_path")
    fields = {
        name: value
        for name, value in document.items()
        if name not in _READ_FIELDS and not (name == "inputs" and isinstance(value, str))
    }
    said = next((document[name] for name in _LENGTH_FIELDS if document.get(name) is not None), None)
    inputs = document.get("inputs")
    text = document.get("prompt", inputs if isinstance(inputs, str) else "")
    messages = document.get("messages") or ()
    if not (isinstance(text, str) and isinstance(messages, (list, tuple)) and isinstance(said or 1, int)):
        raise InvalidRequest(f"{place} has a field of the wrong type", field="dataset_path")
    max_tokens = output_len or said or DEFAULT_OUTPUT_LEN
    return BenchPrompt(text=text, max_tokens=max_tokens, messages=messages, fields=fields)


_LENGTH_FIELDS = ("output_tokens", "max_tokens", "max_completion_tokens")
# The benchmark sets `stream` and `model` itself.
_READ_FIELDS = frozenset({"prompt", "messages", "stream", "stream_options", "model", *_LENGTH_FIELDS})


def _conversations(
    path: Path, content: bytes, *, output_len: int | None, counter: TokenCounter | None
) -> Iterator[BenchPrompt]:
    """Yield the first message of each conversation, with the length of the next answer."""
    document = _parsed(content, place=str(path))
    if not isinstance(document, list):
        raise InvalidRequest(f"{path} is not a list of conversations", field="dataset_path")
    for entry in document:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        try:
            prompt, answer = str(turns[0]["value"]), str(turns[1]["value"])
        except (TypeError, KeyError):
            continue
        num_prompt, num_new = _num_tokens(prompt, counter), output_len or _num_tokens(answer, counter)
        fits = num_prompt <= _MAX_PROMPT_TOKENS and num_prompt + num_new <= _MAX_TOTAL_TOKENS
        if fits and num_prompt >= _MIN_TOKENS and (output_len or num_new >= _MIN_TOKENS):
            yield BenchPrompt(text=prompt, max_tokens=num_new)


def _num_tokens(text: str, counter: TokenCounter | None) -> int:
    return counter(text) if counter else -(-len(text) // _CHARACTERS_PER_TOKEN)


def _parsed(content: bytes, *, place: str) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{place} is not JSON: {error}", field="dataset_path") from None


def local_counter(path: Path) -> TokenCounter:
    """Return a counter that uses a tokenizer.json, given as a file or by its folder.

    Raises:
        InvalidRequest: there is no tokenizer.json, or it cannot be read.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(f"there is no tokenizer at {file}", field="tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"{file} is not a tokenizer: {error}", field="tokenizer") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def server_counter(http: httpx2.Client, *, model: str) -> TokenCounter | None:
    """Return a counter that calls a server's `POST /tokenize`; None: the server has no such route.

    The counter raises Unreachable if the server does not answer as it should.
    """
    for body, read in _FORMS:
        counter = partial(_count_at_server, http=http, model=model, body=body, read=read)
        with suppress(Unreachable):
            if counter("one two three") > 0:
                return counter
    return None


# The shapes of vLLM, llama.cpp and TGI: the body of a request, and the number of tokens in its reply.
_FORMS: Sequence[tuple[Callable[[str, str], Any], Callable[[Any], int]]] = (
    (
        lambda text, model: {"model": model, "prompt": text, "add_special_tokens": False},
        lambda reply: int(reply["count"]),
    ),
    (lambda text, _model: {"content": text}, lambda reply: len(reply["tokens"])),
    (
        lambda text, _model: {"inputs": text, "add_special_tokens": False},
        lambda reply: len([token["id"] for token in reply]),
    ),
)


def _count_at_server(
    text: str,
    *,
    http: httpx2.Client,
    model: str,
    body: Callable[[str, str], Any],
    read: Callable[[Any], int],
) -> int:
    try:
        reply = http.post("/tokenize", json=body(text, model))
        reply.raise_for_status()
        return read(reply.json())
    except (httpx2.HTTPError, KeyError, TypeError, ValueError) as error:
        raise Unreachable(
            f"{http.base_url} cannot count tokens with /tokenize: {error}",
            remedy="try --tokenizer none, or the tokenizer.json of the model",
        ) from error
