"""Tokenizer: text and chat messages to token ids, and token ids back to text."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import tokenizers

from genserve.errors import SEE_LOG, ContextLengthExceeded, InvalidRequest, ModelFailed
from genserve.prompt import Chat, Message, ToolCall
from genserve.text.chat_template import ChatTemplate, map_strings
from genserve.text.detokenizer import ByteTokens, Detokenizer
from genserve.text.reasoning import THINKING_STARTS
from genserve.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from genserve.text.vocabulary import TokenLengths, TokenNames, spelled, spells_bytes

logger = logging.getLogger(__name__)

# Code points that are not characters, so that no message and no template contains them. The mark is part of
# the names of renamed special tokens. Surrogates replace the names of special tokens in messages; the last
# surrogate but one marks the ends of messages, and the last one belongs to `chat_template.py`.
MARK = "\ufdd0"
SURROGATES = range(0xD800, 0xDFFE)
_END_OF_MESSAGE = "\udffe"

# The tokenizers by folder and files: a tokenizer stage and its ensembles share one.
_IN_USE: WeakValueDictionary[tuple[object, ...], Tokenizer] = WeakValueDictionary()


class Tokenizer:
    """The tokenizer of one model; immutable, so safe from any thread.

    It uses only the batch calls of `tokenizers`, because they release the GIL. Long texts take long all the
    same: call `encode` and `encode_chat` off the event loop.

    Attributes:
        vocab_size: number of tokens, including added ones.
        eos_token_ids: the tokens that end a text; empty if the model has none.
        bos_id: the token that is prepended to a text, or None.
        bos_token, eos_token: the texts of the tokens that begin and end a text, or None.
        chat_template: None for a model without chat.
        config: tokenizer_config.json, with the special tokens as texts.
        byte_tokens: the tokens that stand for one byte each, by which some vocabularies spell unknown
            characters.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend = files.backend
        self.vocab_size: int = self._backend.get_vocab_size()
        self.eos_token_ids = files.eos_token_ids
        self.bos_token = files.special_tokens.get("bos_token")
        self.eos_token = files.special_tokens.get("eos_token")
        self.chat_template = files.chat_template
        self.config: Mapping[str, Any] = files.config | files.special_tokens
        self._tool_template = files.tool_template
        bos_id = self._backend.token_to_id(self.bos_token) if self.bos_token else None
        self.bos_id: int | None = bos_id if files.add_bos_token else None
        added = self._backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_names = TokenNames(self._special)
        self._special_text = self.special_names.pattern
        self.byte_tokens = ByteTokens(_byte_token_ids(self._backend))
        self._spells_bytes = spells_bytes(self._backend.decoder)

    @staticmethod
    def from_folder(path: Path) -> Tokenizer:
        """Return the tokenizer of a folder; all callers share one as long as the files do not change.

        Raises:
            RepositoryError: a file is missing or broken; the message names it.
        """
        files = sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in path.glob("*"))
        key = (path, *files)
        tokenizer = _IN_USE.get(key)
        if tokenizer is None:
            tokenizer = _IN_USE[key] = Tokenizer(read_tokenizer_files(path))
        return tokenizer

    def has_vocabulary_of(self, other: Tokenizer) -> bool:
        """Whether both tokenizers have the same vocabulary."""
        return bool(self._backend.get_vocab() == other._backend.get_vocab())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a prompt; the names of special tokens in it are encoded as these tokens.

        Args:
            text: the prompt, of any length.
            add_special_tokens: prepend the bos token, if the model has one to prepend.
            max_tokens: how many tokens the caller can use; None: any number.

        Raises:
            InvalidRequest: the text is not valid Unicode; `field` is "prompt".
            ModelFailed: the tokenizer's files are broken.
            TooManyTokens: there are more than `max_tokens`.
        """
        _reject_surrogates(text, field="prompt")
        ids = self._encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        if not add_special_tokens or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def encode_texts(
        self, texts: Sequence[tuple[str, ...]], *, max_length: int | None = None, truncate: bool = False
    ) -> list[EncodedText]:
        """Return the tokens of texts or of pairs of texts, each as the encoder of a model reads it.

        Args:
            texts: tuples with one text, or with two that the encoder reads together.
            max_length: the most tokens of each, special tokens included; None: any number.
            truncate: leave out the end of what is longer, of a pair the end of the longer text.

        Raises:
            InvalidRequest: a text is not valid Unicode; `field` is "input".
            ModelFailed: the tokenizer's files are broken.
            ContextLengthExceeded: one is longer than `max_length`; `field` has its index, such as "input[3]".
        """
        for text in itertools.chain.from_iterable(texts):
            _reject_surrogates(text, field="input")
        inputs = [text[0] if len(text) == 1 else text for text in texts]
        with _tokenizer_call():
            encoded = self._backend.encode_batch_fast(inputs)
        rows = []
        for index, encoding in enumerate(encoded):
            if max_length is not None and len(encoding) > max_length:
                if not truncate:
                    raise ContextLengthExceeded(
                        f"a text has {len(encoding)} tokens; the model reads {max_length}",
                        remedy="send shorter parts of the text, or let the server truncate it",
                        field=f"input[{index}]",
                        num_tokens=len(encoding),
                        max_length=max_length,
                    )
                encoding = self._truncated(texts[index], max_length)
            rows.append(EncodedText(encoding.ids, encoding.type_ids))
        return rows

    def _truncated(self, text: tuple[str, ...], max_length: int) -> tokenizers.Encoding:
        """Return the tokens of one text or a pair, truncated as tokenizers' strategy "longest_first" does."""
        with _tokenizer_call():
            parts = self._backend.encode_batch_fast([*text], add_special_tokens=False)
            room = max(0, max_length - self._backend.num_special_tokens_to_add(len(parts) > 1))
            lengths = [room]
            if len(parts) > 1:
                shorter = min(map(len, parts))
                longer = shorter if shorter > room else max(shorter, room - shorter)
                if shorter + longer > room:
                    shorter, longer = room // 2, room - room // 2
                lengths = [shorter, longer] if len(parts[0]) <= len(parts[1]) else [longer, shorter]
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length)
            return self._backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which names of special tokens are ordinary text; raises as `encode`."""
        _reject_surrogates(text, field="prompt")
        with _tokenizer_call():
            return self._renamed_specials.encode(text)

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """Return the ids of a prompt, as `encode`, each with the range of its characters in the text."""
        _reject_surrogates(text, field="prompt")
        with _tokenizer_call():
            [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        # Making all `offsets` at once would hold the interpreter's lock for the whole time.
        places = (encoding.token_to_chars(index) or (0, 0) for index in range(len(encoding)))
        spans = [(token_id, *place) for token_id, place in zip(encoding.ids, places, strict=True)]
        begins = self.bos_id is None or encoding.ids[:1] == [self.bos_id]
        return spans if begins or not add_special_tokens else [(self.bos_id or 0, 0, 0), *spans]

    def encode_chat(
        self, chat: Chat, *, add_special_tokens: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of the prompt for the assistant's next turn, by the model's chat template.

        The name of a special token in a message stays text, so that no message can end its own turn. (Tokens
        are special if tokenizer.json says so; `<think>` and the like usually are not.)

        Args:
            chat: the messages, tools and template variables of the request.
            add_special_tokens: prepend the tokens that begin a text to what the template writes.
            max_tokens: how many tokens the caller can use; None: any number.

        Raises:
            InvalidRequest: there is no template, it rejects the messages, or a message is not valid Unicode.
            ModelFailed: the template or the tokenizer is broken.
            TooManyTokens: there are more than `max_tokens`.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template",
                remedy="send a prompt to /generate, or add chat_template.jinja to its tokenizer stage",
                field="messages",
            )
        written = sorted({name for text in _texts_of(chat) for name in self._special_text.findall(text)})
        if len(written) > len(SURROGATES):
            raise InvalidRequest("the messages contain too many special tokens", field="messages")
        placeholders = dict(zip(written, map(chr, SURROGATES), strict=False))

        def mask(text: str) -> str:
            # What the template's form of the chat adds between messages is no text of the request.
            return self._special_text.sub(lambda match: placeholders.get(match[0], match[0]), text)

        prompt = self._template_for(chat).render(chat, change=mask)
        ids = self._encode_prompt(prompt, placeholders=placeholders, max_tokens=max_tokens)
        return [*self.encode(""), *ids] if add_special_tokens else ids

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The template of chats with tools: the model's own template for tools, or else its chat template."""
        return self._tool_template or self.chat_template

    def added_names(self, is_wanted: Callable[[int], bool]) -> TokenNames:
        """Return the names of the wanted added tokens, which include the special tokens."""
        return TokenNames({token_id: name for token_id, name in self._added.items() if is_wanted(token_id)})

    def special_tokens_in(self, texts: Iterable[str], *, shown: Collection[int] = ()) -> dict[int, str]:
        """Return the names, by id, of the special tokens named in some texts, except those in `shown`."""
        parts = (part for text in texts for part in self.special_names.split(text))
        return {part: self._special[part] for part in parts if isinstance(part, int) and part not in shown}

    def encode_generation_prompt(self, chat: Chat) -> list[int]:
        """Return the ids of the text that the template writes after the last message.

        A continued message of the assistant is included, as the beginning of the answer.

        Raises:
            InvalidRequest, ModelFailed: as `encode_chat`.
        """
        *before, last = chat.messages
        if chat.continue_final_message and last.role == "assistant":
            # The names of special tokens in a continued message are text.
            last = replace(last, content=self._special_text.sub("", last.content))
        else:
            last = _with_marked_end(last)
        marked = replace(chat, messages=(*map(_with_marked_end, before), last))
        return self._encode(self._template_for(chat).render(marked).rpartition(_END_OF_MESSAGE)[2])

    def close(self) -> None:
        """End the process of the chat template; the next chat starts a new one."""
        for template in (self.chat_template, self._tool_template):
            if template is not None:
                template.close()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, by default without special tokens; invalid UTF-8 becomes U+FFFD."""
        [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """Return the name of a token in the vocabulary, or None."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def token_texts(self) -> list[str]:
        """Return the text of each single token of the vocabulary, by id; empty for special ones."""
        alone = [[token_id] for token_id in range(self.vocab_size)]
        return list(self._backend.decode_batch(alone, skip_special_tokens=True))

    def as_plain_json(self) -> str:
        """Return the tokenizer.json of a copy to which the names of special tokens are ordinary text."""
        return self._renamed_specials.to_json()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: Collection[int] = (),
        behind: Sequence[int] = (),
    ) -> Detokenizer:
        """Return a new detokenizer for one token sequence.

        Args:
            skip_special_tokens: omit the text of special tokens, except the tokens in `shown`.
            shown: the special tokens whose text is not omitted.
            spaces_between_special_tokens: keep the space that the decoder puts between two added tokens.
            behind: the token ids whose text the detokenizer continues, such as a prompt; see `Detokenizer`.
        """
        if skip_special_tokens:
            hidden = self._special.keys() - shown
            return Detokenizer(_WithSpecialTokens(self, hidden=hidden) if shown else self, behind=behind)
        bare = {} if spaces_between_special_tokens else self._added
        return Detokenizer(_WithSpecialTokens(self), bare=bare, behind=behind)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token never adds to a text: it is special, or not in the vocabulary."""
        return token_id in self._special or self.is_unknown(token_id)

    def is_unknown(self, token_id: int) -> bool:
        """Whether the id is not in the vocabulary."""
        return self._backend.id_to_token(token_id) is None

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds to any text, which may be a part of a character.

        None: they depend on the text, such as the space that decoders drop at its beginning.
        """
        value = self.byte_tokens.values.get(token_id)
        if value is not None:
            return bytes([value])
        name = self.token(token_id) if self._spells_bytes else None
        if name is None:
            return None
        return name.encode() if token_id in self._added else spelled(name)

    def _template_for(self, chat: Chat) -> ChatTemplate:
        template = self.tool_template if chat.tools else self.chat_template
        assert template is not None     # without a template there is no prompt
        return template

    def _encode(
        self, text: str, *, add_special_tokens: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        self._check_length(text, max_tokens)
        with _tokenizer_call():
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        # Listing a million ids holds the interpreter's lock for a while.
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding), is_least=False)
        ids: list[int] = encoding.ids
        return ids

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise TooManyTokens if it is certain: encoding a million characters takes a second."""
        # Short texts need no token lengths.
        if max_tokens is None or len(text) <= max_tokens:
            return
        if self._lengths.has_more_tokens(text, max_tokens):
            raise TooManyTokens(max_tokens + 1, is_least=True)

    @cached_property
    def _lengths(self) -> TokenLengths:
        return TokenLengths(self._backend)

    def _encode_prompt(
        self, prompt: str, *, placeholders: dict[str, str], max_tokens: int | None
    ) -> list[int]:
        # The template writes its own bos token, so none is added, as in transformers.
        if not placeholders:
            return self._encode(prompt, max_tokens=max_tokens)
        self._check_length(prompt, max_tokens)
        renamed = self._renamed_specials.rename(prompt, self._special_text, placeholders=placeholders)
        with _tokenizer_call():
            return self._renamed_specials.encode(renamed)

    @cached_property
    def _renamed_specials(self) -> RenamedSpecials:
        # Built lazily, because few messages contain the name of a special token.
        return RenamedSpecials(self._backend, self._special)


class EncodedText(NamedTuple):
    """The tokens of a text, or of a pair of texts, for an encoder."""

    ids: list[int]
    type_ids: list[int]     # 1 for the tokens of the second text of a pair, if the model tells them apart


class TooManyTokens(Exception):
    """A text has more tokens than the caller can use.

    Attributes:
        num_tokens: the number of tokens of the text.
        is_least: the text has at least `num_tokens`; it was not encoded.
    """

    def __init__(self, num_tokens: int, *, is_least: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.is_least = is_least


class _WithSpecialTokens:
    """Decodes for a detokenizer that shows special tokens, except the tokens in `hidden`."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self.byte_tokens = tokenizer.byte_tokens
        self.token_bytes = tokenizer.token_bytes

    def is_silent(self, token_id: int) -> bool:
        return token_id in self._hidden or self._tokenizer.is_unknown(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class RenamedSpecials:
    """A copy of a tokenizer whose special tokens have other names, which no text contains.

    It encodes a text with both special tokens and text that looks like them, although the library recognises
    either all names of special tokens or none. Ids stay the same, and so do the rules for spaces around
    tokens, for the start of a text and for words across tokens. Making one takes as long as loading the
    tokenizer.

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
        tokenizer["post_processor"] = None  # it would add tokens by their names
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))

    def rename(self, prompt: str, special: re.Pattern[str], *, placeholders: Mapping[str, str]) -> str:
        """Rename the special tokens that a template wrote, and restore the names in messages, which are text.

        Args:
            prompt: the rendered chat, in whose messages placeholders stand for the names of special tokens.
            special: matches the names of the special tokens.
            placeholders: one character for each name in a message.

        Raises:
            InvalidRequest: the messages contain a character of the new names.
        """
        if MARK in prompt:
            raise InvalidRequest(
                "the messages contain the noncharacter U+FDD0 together with the name of a special token",
                field="messages",
            )
        renamed = special.sub(lambda match: self.names[match[0]], prompt)
        for text, char in placeholders.items():
            renamed = renamed.replace(char, text)
        return renamed

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens have their names in `names`."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def to_json(self) -> str:
        """Return the copy as a tokenizer.json."""
        return str(self._backend.to_str())

    def _rename_words(self, model: dict[str, Any]) -> None:
        """Rename special tokens that are also ordinary vocabulary, which would match them in a text."""
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


def _byte_token_ids(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Return the byte tokens, by byte; empty if the decoder treats their names as text."""
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    known = {byte: token_id for byte, token_id in ids.items() if token_id is not None}
    letter = known.get(ord("A"))
    return known if letter is not None and backend.decode([letter]) == "A" else {}


@contextmanager
def _tokenizer_call() -> Iterator[None]:
    """Turn exceptions of the library into ModelFailed, such as for a word that a vocabulary lacks.

    The library's panics are included, which are no `Exception`: a regex gives up after ten million steps.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        logger.exception("the tokenizer failed")
        raise ModelFailed(
            "the tokenizer cannot encode this text",
            remedy=f"{SEE_LOG}; take tokenizer.json from the model's original checkpoint",
        ) from error


def _reject_surrogates(text: str, *, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: character {error.start} is half of a surrogate pair",
            remedy="send the text as UTF-8, or escape both halves",
            field=field,
        ) from None


def _with_marked_end(message: Message) -> Message:
    """Return the message with a mark after each of its texts, which shows where a template wrote the text."""

    def marked(text: str) -> str:
        # Tags are broken up, since a template may drop the mark with the reasoning.
        for start in THINKING_STARTS:
            text = text.replace(start, start[0] + _END_OF_MESSAGE + start[1:])
        return text + _END_OF_MESSAGE

    def marked_call(call: ToolCall) -> ToolCall:
        arguments = map_strings(call.shown_arguments(), marked)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return replace(call, arguments=text)

    return replace(
        message,
        content=marked(message.content),
        reasoning_content=message.reasoning_content and marked(message.reasoning_content),
        tool_calls=tuple(map(marked_call, message.tool_calls)),
    )


def _texts_of(chat: Chat) -> list[str]:
    """Return all texts of a request that its prompt may contain; raises InvalidRequest."""
    texts: list[str] = []
    for index, message in enumerate(chat.messages):
        place = f"messages[{index}]"
        for name in ("content", "reasoning_content", "tool_call_id", "name"):
            texts += _strings_in(getattr(message, name), field=f"{place}.{name}")
        for number, call in enumerate(message.tool_calls):
            # Templates write the arguments as an object or as the text itself, which may have more.
            values = [call.id, call.name, call.arguments, call.shown_arguments()]
            texts += _strings_in(values, field=f"{place}.tool_calls[{number}]")
    for index, tool in enumerate(chat.tools):
        texts += _strings_in(tool.as_dict(), field=f"tools[{index}]")
    for name, value in chat.template_kwargs.items():
        texts += _strings_in(value, field=f"chat_template_kwargs.{name}")
    return texts


def _strings_in(value: Any, *, field: str) -> list[str]:
    """Return all strings in a JSON value, including the keys of its objects; raises InvalidRequest."""
    texts: list[str] = []
    try:
        map_strings(value, texts.append)
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from None
    for text in texts:
        _reject_surrogates(text, field=field)
    return texts
