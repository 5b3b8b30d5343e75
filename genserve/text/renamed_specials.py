"""Renamed specials: a copy of a tokenizer to which the names of its special tokens are ordinary text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

__all__ = ["MARK", "RenamedSpecials"]

# A code point that is no character: the new names have it, and no text may.
MARK = "\ufdd0"


class RenamedSpecials:
    """Encodes a text in which special tokens stand beside text that looks like them.

    A tokenizer finds special tokens by their names, and a switch of the library finds all or none. In the
    copy each has another name, that no text has, and the same id; all else is the same: the rules for the
    space around a token, for the beginning of a text, and for words that run across. Takes as long to make as
    the tokenizer took to load.

    Args:
        backend: the tokenizer; not modified.
        specials: the names of its special tokens, by id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, specials: Mapping[int, str]) -> None:
        self.names = {name: f"{MARK}{token_id}{MARK}" for token_id, name in specials.items()}
        tokenizer = json.loads(backend.to_str())
        for token in tokenizer["added_tokens"]:
            token["content"] = self._renamed(token["content"])
        self._rename_words(tokenizer["model"])
        tokenizer["post_processor"] = None  # it adds tokens, by name; here nothing is added
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a special token is one whose name in it is that in `names`."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def to_json(self) -> str:
        """Return the copy as `tokenizers` writes it to tokenizer.json."""
        return str(self._backend.to_str())

    def _rename_words(self, model: dict[str, Any]) -> None:
        """Rename those that are words of the model too, which could be found in a text by it."""
        words = model["vocab"]
        if isinstance(words, dict):
            model["vocab"] = {self._renamed(word): token_id for word, token_id in words.items()}
        else:
            model["vocab"] = [[self._renamed(word), score] for word, score in words]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._renamed(model["unk_token"])
        if "merges" in model:
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if self.names.keys().isdisjoint([*pair, "".join(pair)])]

    def _renamed(self, word: str) -> str:
        return self.names.get(word, word)
