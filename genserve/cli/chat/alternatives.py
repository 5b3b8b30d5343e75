"""Alternatives: the likeliest other tokens at each place of an answer, to look at and to go on from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Dimension, FormattedTextControl, HSplit, Layout, Window

from genserve.cli.chat.conversation import Conversation
from genserve.cli.console import visible
from genserve.cli.model_access import OpenedModel, TextGenerator
from genserve.completion import TokenLogprob
from genserve.errors import InvalidRequest
from genserve.prompt import Chat

_NUM_ALTERNATIVES = 8
_SURE = 0.5     # the probability from which a token needs no look
_BAR_COLUMNS = 20
_NUM_THREADS = 16   # a model on a server is asked for each text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """The tokens of an answer, with the likeliest tokens at the place of each."""

    token_ids: tuple[int, ...]
    scores: tuple[TokenLogprob, ...]

    def probability(self, place: int) -> float:
        """Return the probability of the token at a place, before any sampling rule."""
        return math.exp(self.scores[place].logprob)

    def beginning(self, place: int, choice: int) -> tuple[int, ...]:
        """Return the tokens up to a place, with one of the likeliest there."""
        return (*self.token_ids[:place], self.scores[place].top[choice][0])


def score_last_answer(model: OpenedModel, conversation: Conversation) -> ScoredAnswer:
    """Return the last answer with its alternatives, which one forward over the conversation finds.

    Raises:
        InvalidRequest: there is no answer, or it is empty.
        GenserveError: the model failed.
    """
    exchange = conversation.last
    if exchange is None:
        raise InvalidRequest("there is no answer yet")
    text_model = model.text_model
    prompt_ids = text_model.tokenize(Chat(messages=tuple(conversation.messages()[:-1])))
    answer_ids = exchange.token_ids or text_model.tokenize(exchange.answer, add_special_tokens=False)
    if model.max_length is not None:    # there must be room for one more token
        answer_ids = answer_ids[: model.max_length - 1 - len(prompt_ids)]
    if not answer_ids:
        raise InvalidRequest("the last answer is empty")
    [scored] = text_model.complete(
        [[*prompt_ids, *answer_ids]], max_tokens=1, prompt_logprobs=_NUM_ALTERNATIVES, temperature=0.0
    )
    return ScoredAnswer(token_ids=answer_ids, scores=scored.prompt_logprobs[-len(answer_ids) :])


class TokenPicker:
    """Moves over the tokens of an answer, and chooses among the alternatives of one.

    Attributes:
        answer: the tokens.
        place: the index of the token that is looked at.
        choice: the index of the alternative that is marked.
    """

    def __init__(self, answer: ScoredAnswer, texts: TokenTexts) -> None:
        """Begin at the first token of which the model was not sure."""
        self.answer = answer
        self._texts = texts
        self._pieces = [visible(text) for text in texts.of(answer.token_ids)]
        self.place, self.choice = 0, 0
        if answer.probability(0) >= _SURE:
            self.move_to_unsure(1)

    def move(self, by: int) -> None:
        """Look at another token."""
        self.place = min(max(self.place + by, 0), len(self._pieces) - 1)
        self.choice = 0

    def move_to_unsure(self, step: int) -> None:
        """Look at the next token (-1: the one before) whose probability is low; stay if there is none."""
        place = self.place + step
        while 0 <= place < len(self._pieces):
            if self.answer.probability(place) < _SURE:
                self.move(place - self.place)
                return
            place += step

    def choose(self, by: int) -> None:
        """Mark another alternative."""
        self.choice = (self.choice + by) % len(self.answer.scores[self.place].top)

    def answer_fragments(self) -> StyleAndTextTuples:
        """Return the answer: the token that is looked at is reversed, unlikely ones are coloured."""
        fragments: StyleAndTextTuples = []
        for place, piece in enumerate(self._pieces):
            if place == self.place:
                fragments += [("[SetCursorPosition]", ""), ("reverse", _shown(piece))]
                fragments += [("", "\n" * piece.count("\n"))]
            else:
                fragments.append((_style(self.answer.probability(place)), piece))
        return fragments

    def alternative_fragments(self) -> StyleAndTextTuples:
        """Return a line for each alternative, with its probability."""
        top = self.answer.scores[self.place].top
        previous = self.answer.token_ids[self.place - 1] if self.place else None
        texts = self._texts.all_after([(previous, token_id) for token_id, _ in top])
        fragments: StyleAndTextTuples = []
        for index, ((token_id, logprob), text) in enumerate(zip(top, texts, strict=True)):
            mark = "▸" if index == self.choice else " "
            taken = "•" if token_id == self.answer.token_ids[self.place] else " "
            bar = "█" * round(_BAR_COLUMNS * math.exp(logprob))
            line = f"{mark}{taken}{math.exp(logprob):7.1%}  {_shown(visible(text))!s:<16} {bar}\n"
            fragments.append(("bold" if index == self.choice else "", line))
        return fragments


def pick_alternative(picker: TokenPicker) -> bool:
    """Let the user look around; whether the answer is to go on from the alternative that is marked."""
    text = Window(
        FormattedTextControl(picker.answer_fragments, focusable=True, show_cursor=False), wrap_lines=True
    )
    choices = Window(
        FormattedTextControl(picker.alternative_fragments), height=Dimension.exact(_NUM_ALTERNATIVES)
    )
    keys = "← → token, Tab unsure one, ↑ ↓ alternative, Enter goes on from it, Esc"
    hint = Window(FormattedTextControl([("italic", keys)]), wrap_lines=True, dont_extend_height=True)
    gap = Window(height=1)
    application: Application[bool] = Application(
        layout=Layout(HSplit([text, gap, choices, hint])),
        key_bindings=_keys(picker),
        erase_when_done=True,
    )
    application.ttimeoutlen = application.timeoutlen = 0.1  # Esc alone
    return application.run()


def _keys(picker: TokenPicker) -> KeyBindings:
    keys = KeyBindings()
    moves = {
        "left": lambda: picker.move(-1),
        "right": lambda: picker.move(1),
        "up": lambda: picker.choose(-1),
        "down": lambda: picker.choose(1),
        "tab": lambda: picker.move_to_unsure(1),
        "s-tab": lambda: picker.move_to_unsure(-1),
        "home": lambda: picker.move(-picker.place),
        "end": lambda: picker.move(len(picker.answer.token_ids)),
    }
    for key, move in moves.items():
        keys.add(key)(lambda _event, move=move: move())

    @keys.add("enter")
    def _go_on(event: KeyPressEvent) -> None:
        event.app.exit(result=True)

    @keys.add("escape")
    @keys.add("q")
    @keys.add("c-c")
    @keys.add("c-d")
    @keys.add("<sigint>")
    def _leave(event: KeyPressEvent) -> None:
        event.app.exit(result=False)

    return keys


def _shown(text: str) -> str:
    """Return a token so that it can be seen."""
    return text.replace("\n", "⏎").replace("\t", "⇥") if text.strip(" ") else "␣" * len(text) or "·"


def _style(probability: float) -> str:
    if probability >= _SURE:
        return ""
    return "ansiyellow" if probability >= _SURE / 5 else "ansired"


def beginning_text(model: OpenedModel, token_ids: Sequence[int]) -> tuple[str, bool]:
    """Return the text of the beginning of an answer, and whether its last token ends the answer.

    Raises:
        InvalidRequest: the last token is a part of a character.
    """
    text = model.text_model.detokenize(token_ids, skip_special_tokens=True)
    if text.endswith("\ufffd"):
        raise InvalidRequest("this token is a part of a character", remedy="choose the tokens before it")
    return text, not model.text_model.detokenize(token_ids[-1:], skip_special_tokens=True)


class TokenTexts:
    """The texts of the tokens of one model."""

    def __init__(self, model: TextGenerator) -> None:
        self._decode = cache(model.detokenize)

    def after(self, previous: int | None, token_id: int) -> str:
        """Return what a token adds after another one; None: at the beginning of a text.

        A token that is a part of a character adds U+FFFD.
        """
        if previous is None:
            return self._decode((token_id,))
        before, both = self._decode((previous,)), self._decode((previous, token_id))
        return both[len(before) :] if both.startswith(before) else self._decode((token_id,))

    def all_after(self, pairs: Sequence[tuple[int | None, int]]) -> list[str]:
        """Return the results of `after`."""
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return list(threads.map(lambda pair: self.after(*pair), pairs))

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts of the tokens of one text."""
        return self.all_after(list(zip([None, *token_ids], token_ids, strict=False)))
