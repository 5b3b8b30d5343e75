"""Token counters: how many tokens a text has, as a server or a tokenizer.json counts them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx2

from genserve.errors import InvalidRequest, Unreachable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenCounter(Protocol):
    """Counts the tokens of texts, without special tokens around them."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""


class LocalCounter:
    """Counts with a tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class ServerCounter:
    """Counts with `POST /tokenize` of a server: vLLM's, llama.cpp's or TGI's form of it."""

    def __init__(self, http: httpx2.Client, *, model: str, form: str) -> None:
        self._http = http
        self._model = model
        self._form = form

    def count(self, text: str) -> int:
        """Return the number of tokens of a text.

        Raises:
            Unreachable: the server does not answer as it should.
        """
        body = _FORMS[self._form](text, self._model)
        try:
            reply = self._http.post("/tokenize", json=body)
            reply.raise_for_status()
            return _count_in(self._form, reply.json())
        except (httpx2.HTTPError, KeyError, TypeError, ValueError) as error:
            raise Unreachable(
                f"{self._http.base_url} cannot count tokens with /tokenize: {error}",
                remedy="try --tokenizer none, or the tokenizer.json of the model",
            ) from error


def _count_in(form: str, reply: Any) -> int:
    """Return the count in a reply; raises KeyError or TypeError if it has another shape."""
    match form:
        case "vllm":
            return int(reply["count"])
        case "llama.cpp":
            return len(reply["tokens"])
        case _:
            return len([token["id"] for token in reply])


_FORMS: Mapping[str, Any] = {
    "vllm": lambda text, model: {"model": model, "prompt": text, "add_special_tokens": False},
    "llama.cpp": lambda text, _model: {"content": text},
    "tgi": lambda text, _model: {"inputs": text, "add_special_tokens": False},
}


def local_counter(path: Path) -> LocalCounter:
    """Return the counter of a tokenizer.json, or of a folder that has one.

    Raises:
        InvalidRequest: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(f"there is no tokenizer at {file}", field="tokenizer")
    try:
        return LocalCounter(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises plain ones
        raise InvalidRequest(f"{file} is not a tokenizer: {error}", field="tokenizer") from error


def server_counter(http: httpx2.Client, *, model: str) -> ServerCounter | None:
    """Return the counter of a server, or None if it has no /tokenize."""
    for form in _FORMS:
        counter = ServerCounter(http, model=model, form=form)
        with suppress(Unreachable):
            if counter.count("one two three") > 0:
                return counter
    return None
