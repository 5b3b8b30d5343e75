"""Tokenizer: text and chat messages to token ids, and token ids back to text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import tokenizers

from genserve.errors import SEE_LOG, InvalidRequest, ModelFailed
from genserve.prompt import Chat, Message
from genserve.text.detokenizer import Detokenizer
from genserve.text.reasoning_parser import START
from genserve.text.tokenizer_files import TokenizerFiles, read_tokenizer_files

__all__ = ["MARK", "RenamedSpecials", "Spellings", "TokenTexts", "Tokenizer"]


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


MAX_KNOWN = 64


class TokenTexts(Protocol):
    """What spellings ask of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        ...

    def token_texts(self) -> list[str]:
        """The text of each token of the vocabulary alone, by id; empty for a special one."""
        ...


class Spellings:
    """Finds spellings by a look at the whole vocabulary, and keeps those of the latest texts.

    A text may begin anywhere in a token, and end anywhere in one. Where it needs several, those after the
    first are as the tokenizer writes the rest of it. Safe from any thread.
    """

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, Sequence[Sequence[int]]] = {}

    def of(self, text: str) -> Sequence[Sequence[int]]:
        """Return each sequence of token ids that has the text and would not without its first or last one."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = self._known[text] = tuple(self._spell(text))
        return found

    @cached_property
    def _token_texts(self) -> list[str]:
        return self._tokenizer.token_texts()

    def _spell(self, text: str) -> Iterator[list[int]]:
        begun = [text[:length] for length in range(1, len(text))]
        rests = {part: self._tokenizer.encode(text[len(part) :], add_special_tokens=False) for part in begun}
        for token_id, own in enumerate(self._token_texts):
            if text in own:
                yield [token_id]
            elif own.endswith(tuple(begun)):
                yield from ([token_id, *rest] for part, rest in rests.items() if own.endswith(part))


logger = logging.getLogger(__name__)

# Stand-ins for special tokens that somebody wrote into a message: these code points are not characters,
# so that no message and no template has one. The last is the chat template's own, the one before marks where
# a message ends.
SURROGATES = range(0xD800, 0xDFFE)
_END_OF_MESSAGE = "\udffe"

# By folder, and what its files are: a tokenizer stage and the ensembles that it is of share one.
_IN_USE: WeakValueDictionary[tuple[object, ...], Tokenizer] = WeakValueDictionary()


class Tokenizer:
    """The tokenizer of one model. Nothing changes after it is made: safe from any thread.

    Texts go through the batch calls of `tokenizers` alone, because they release the GIL. A long text still
    takes its time, so call `encode` and `encode_chat` off the event loop.

    Attributes:
        vocab_size: number of tokens, the added ones included.
        eos_token_ids: each of them ends a text; empty if the model has none.
        bos_id: of the token that is put before a text; None: the model wants none.
        bos_token: text of the token that begins a text, or None.
        eos_token: text of the token that ends a text, or None.
        chat_template: None for a model that does not chat.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend = files.backend
        self.vocab_size: int = self._backend.get_vocab_size()
        self.eos_token_ids = files.eos_token_ids
        self.bos_token = files.special_tokens.get("bos_token")
        self.eos_token = files.special_tokens.get("eos_token")
        self.chat_template = files.chat_template
        bos_id = self._backend.token_to_id(self.bos_token) if self.bos_token else None
        self.bos_id: int | None = bos_id if files.add_bos_token else None
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        longest_first = sorted(self._special.values(), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        byte_tokens = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self._byte_fallback = {token_id for token_id in byte_tokens if token_id is not None}

    @staticmethod
    def from_folder(path: Path) -> Tokenizer:
        """The tokenizer whose files lie in `path`; one that is in use is not read again while they stay.

        Raises:
            RepositoryError: a file is missing or broken; names it.
        """
        files = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in path.glob("*"))
        key = (path, *files)
        tokenizer = _IN_USE.get(key)
        if tokenizer is None:
            tokenizer = _IN_USE[key] = Tokenizer(read_tokenizer_files(path))
        return tokenizer

    def has_vocabulary_of(self, other: Tokenizer) -> bool:
        """Whether each token id means the same in both."""
        return bool(self._backend.get_vocab() == other._backend.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a prompt. Text of special tokens in it means these tokens: the caller meant them.

        Args:
            text: any length.
            add_special_tokens: begin with the model's bos token, if it wants one.

        Raises:
            InvalidRequest: the text is not valid Unicode; `field` is "prompt".
            ModelFailed: the tokenizer's files are at fault.
        """
        _refuse_surrogates(text, field="prompt")
        [ids] = self._encode([text], add_special_tokens=add_special_tokens)
        if not add_special_tokens or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def encode_chat(self, chat: Chat) -> list[int]:
        """The ids of the prompt for the assistant's next turn, by the model's chat template.

        Text of special tokens inside a message stays text: no message can end its own turn. (Tokens count as
        special if tokenizer.json says so; `<think>` and its like usually do not.)

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or one is not valid Unicode.
            ModelFailed: the template or the tokenizer is at fault.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template",
                remedy="send a prompt to /generate, or put chat_template.jinja into its tokenizer stage",
                field="messages",
            )
        for index, message in enumerate(chat.messages):
            _refuse_surrogates(message.content, field=f"messages[{index}].content")
            _refuse_surrogates(message.reasoning_content, field=f"messages[{index}].reasoning_content")
        texts = [text for message in chat.messages for text in (message.content, message.reasoning_content)]
        for name, value in chat.template_kwargs.items():
            texts += _texts_in(value, field=f"chat_template_kwargs.{name}")
        written = sorted({special for text in texts for special in self._special_text.findall(text)})
        if len(written) > len(SURROGATES):
            raise InvalidRequest("the messages hold too many special tokens", field="messages")
        stand_ins = dict(zip(written, map(chr, SURROGATES), strict=False))
        prompt = self.chat_template.render(self._with_stand_ins(chat, stand_ins))
        return self._encode_prompt(prompt, stands_for={char: text for text, char in stand_ins.items()})

    def encode_behind_messages(self, chat: Chat) -> list[int]:
        """The ids of what the template writes behind the last message: of its own words alone.

        The assistant's message that is continued belongs to it, as the beginning of the answer. Renders the
        chat, with marks where messages end. Raises what `encode_chat` raises.
        """
        assert self.chat_template is not None  # or there is no prompt

        broken = START[0] + _END_OF_MESSAGE + START[1:]     # a template may leave the end of a message out

        def marked_text(text: str) -> str:
            return text.replace(START, broken) + _END_OF_MESSAGE

        def mark(message: Message) -> Message:
            thought = message.reasoning_content and marked_text(message.reasoning_content)
            return replace(message, content=marked_text(message.content), reasoning_content=thought)

        *before, last = chat.messages
        if chat.continue_final_message and last.role == "assistant":
            # What looks like special tokens in it is text.
            last = replace(last, content=self._special_text.sub("", last.content))
        else:
            last = mark(last)
        marked = replace(chat, messages=(*map(mark, before), last))
        return self._encode([self.chat_template.render(marked).rpartition(_END_OF_MESSAGE)[2]])[0]

    def close(self) -> None:
        """End the process of the chat template; the next chat starts another."""
        if self.chat_template is not None:
            self.chat_template.close()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, by default without special tokens; bytes that are no UTF-8 become U+FFFD."""
        [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary; None: it has none of this name."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_texts(self) -> list[str]:
        """The text of each token of the vocabulary alone, by id; empty for a special one."""
        alone = [[token_id] for token_id in range(self.vocab_size)]
        return list(self._backend.decode_batch(alone, skip_special_tokens=True))

    def as_plain_json(self) -> str:
        """The tokenizer.json of one to which the names of special tokens are ordinary text."""
        return self._renamed_specials.to_json()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> Detokenizer:
        """A fresh detokenizer for one token sequence.

        Args:
            skip_special_tokens: they have no text.
            spaces_between_special_tokens: what the decoder puts between two added tokens stays there.
        """
        if skip_special_tokens:
            return Detokenizer(self)
        bare = {} if spaces_between_special_tokens else self._added
        return Detokenizer(_WithSpecialTokens(self), bare=bare)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never adds to a text: it is special, or not in the vocabulary."""
        return token_id in self._special or self.is_unknown(token_id)

    def is_unknown(self, token_id: int) -> bool:
        """Whether the vocabulary has no such id."""
        return self._backend.id_to_token(token_id) is None

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for one byte (`<0x0A>`) and is decoded with the bytes around it."""
        return token_id in self._byte_fallback

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        with _tokenizer_call():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _encode_prompt(self, prompt: str, *, stands_for: dict[str, str]) -> list[int]:
        # The template writes its own bos token, so nothing is added, just as in transformers.
        if not stands_for:
            return self._encode([prompt])[0]
        if MARK in prompt:
            raise InvalidRequest(
                "the messages hold U+FDD0, which is no character, beside the name of a special token",
                field="messages",
            )
        renamed = self._special_text.sub(lambda match: self._renamed_specials.names[match[0]], prompt)
        for char, text in stands_for.items():
            renamed = renamed.replace(char, text)
        with _tokenizer_call():
            return self._renamed_specials.encode(renamed)

    @cached_property
    def _renamed_specials(self) -> RenamedSpecials:
        # Few messages hold the name of a special token: it is made for the first that does.
        return RenamedSpecials(self._backend, self._special)

    def _with_stand_ins(self, chat: Chat, stand_ins: dict[str, str]) -> Chat:
        def stand_in(text: str) -> str:
            return self._special_text.sub(lambda match: stand_ins[match[0]], text)

        return replace(
            chat,
            messages=tuple(
                replace(
                    message,
                    content=stand_in(message.content),
                    reasoning_content=stand_in(message.reasoning_content),
                )
                for message in chat.messages
            ),
            template_kwargs=_with_texts(chat.template_kwargs, stand_in),
        )


class _WithSpecialTokens:
    """The vocabulary of a detokenizer that shows special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_silent = tokenizer.is_unknown
        self.is_byte_fallback = tokenizer.is_byte_fallback

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@contextmanager
def _tokenizer_call() -> Iterator[None]:
    """Raise ModelFailed where the library raises, as it does for a word outside a vocabulary without unk."""
    try:
        yield
    except Exception as error:
        logger.exception("the tokenizer failed")
        raise ModelFailed(
            "the tokenizer cannot encode this text",
            remedy=f"{SEE_LOG}; take tokenizer.json from the model's original checkpoint",
        ) from error


def _refuse_surrogates(text: str, *, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: character {error.start} is half of a surrogate pair",
            remedy="send the text as UTF-8, or escape both halves",
            field=field,
        ) from None


def _texts_in(value: Any, *, field: str) -> list[str]:
    """Return all texts of a JSON value, the keys of its objects included; raises InvalidRequest."""
    texts: list[str] = []
    try:
        _with_texts(value, texts.append)
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from None
    for text in texts:
        _refuse_surrogates(text, field=field)
    return texts


def _with_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON value with each of its texts changed."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): _with_texts(part, change) for key, part in value.items()}
        case list() | tuple():
            return [_with_texts(part, change) for part in value]
    return value
