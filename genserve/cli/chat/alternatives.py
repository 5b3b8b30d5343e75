"""Alternatives: shows the likeliest other tokens of an answer, and continues the answer from one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from prompt_toolkit.application import Application, get_app
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Dimension, FormattedTextControl, HSplit, Layout, Window
from rich.cells import cell_len

from genserve.cli.chat.conversation import Conversation
from genserve.cli.console import visible
from genserve.cli.opened_models import OpenedModel, TextGenerator
from genserve.completion import TokenLogprob
from genserve.errors import InvalidRequest
from genserve.prompt import Chat

_NUM_ALTERNATIVES = 8
_SURE = 0.5     # the probability above which the model was sure of a token
_BAR_COLUMNS = 20
_NUM_THREADS = 16   # a model on a server is called once for each text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """The tokens of an answer, with the likeliest tokens at each position."""

    token_ids: tuple[int, ...]
    scores: tuple[TokenLogprob, ...]

    def probability(self, place: int) -> float:
        """Return the probability of the token at a position, before any sampling rule."""
        return math.exp(self.scores[place].logprob)

    def choices(self, place: int) -> tuple[tuple[int, float], ...]:
        """Return the likeliest tokens and the answer's token at a position, with their log-probabilities."""
        top, token_id = self.scores[place].top, self.token_ids[place]
        is_among = any(token_id == each for each, _ in top)
        return top if is_among else (*top, (token_id, self.scores[place].logprob))

    def beginning(self, place: int, choice: int) -> tuple[int, ...]:
        """Return the tokens before a position, and one of the choices at it."""
        return (*self.token_ids[:place], self.choices(place)[choice][0])


def score_last_answer(model: OpenedModel, conversation: Conversation) -> ScoredAnswer:
    """Return the last answer with its alternatives, found by one forward over the conversation.

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
    if model.max_length is not None:    # the context must have room for one more token
        answer_ids = answer_ids[: model.max_length - 1 - len(prompt_ids)]
    if not answer_ids:
        raise InvalidRequest("the last answer is empty")
    [scored] = text_model.complete(
        [[*prompt_ids, *answer_ids]], max_tokens=1, prompt_logprobs=_NUM_ALTERNATIVES, temperature=0.0
    )
    return ScoredAnswer(token_ids=answer_ids, scores=scored.prompt_logprobs[-len(answer_ids) :])


class TokenPicker:
    """Moves over the tokens of an answer, and chooses among the alternatives of the selected token.

    Attributes:
        answer: the tokens of the answer.
        place: the index of the selected token.
        choice: the index of the selected alternative.
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
        """Select another token."""
        self.place = min(max(self.place + by, 0), len(self._pieces) - 1)
        self.choice = 0

    def move_to_unsure(self, step: int) -> None:
        """Select the next token (-1: the previous one) of low probability, if there is one."""
        place = self.place + step
        while 0 <= place < len(self._pieces):
            if self.answer.probability(place) < _SURE:
                self.move(place - self.place)
                return
            place += step

    def choose(self, by: int) -> None:
        """Select another alternative."""
        self.choice = (self.choice + by) % len(self.answer.choices(self.place))

    def answer_fragments(self, *, width: int) -> StyleAndTextTuples:
        """Return the answer, with the selected token in reverse and unlikely tokens in colour.

        Lines of more than `width` columns are wrapped between words.
        """
        fragments: StyleAndTextTuples = []
        for place, (piece, wrapped) in enumerate(
            zip(self._pieces, _wrapped(self._pieces, width), strict=True)
        ):
            if place != self.place:
                fragments.append((_style(self.answer.probability(place)), wrapped))
                continue
            fragments.append(("[SetCursorPosition]", ""))
            end = next((i for i, char in enumerate(wrapped) if char != piece[i]), None)     # the line's end
            if end is None:
                fragments += [("reverse", _shown(piece)), ("", "\n" * piece.count("\n"))]
            else:
                fragments += [("reverse", piece[:end]), ("", "\n"), ("reverse", piece[end + 1 :] or "␣")]
        return fragments

    def alternative_fragments(self) -> StyleAndTextTuples:
        """Return a line for each alternative, with its probability."""
        top = self.answer.choices(self.place)
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
    """Let the user select an alternative; return whether the answer shall continue from it."""
    text = Window(
        FormattedTextControl(
            lambda: picker.answer_fragments(width=get_app().output.get_size().columns),
            focusable=True,
            show_cursor=False,
        ),
        wrap_lines=True,
    )
    choices = Window(
        FormattedTextControl(picker.alternative_fragments), height=Dimension.exact(_NUM_ALTERNATIVES + 1)
    )
    keys = "← → token, Tab unsure one, ↑ ↓ alternative, Enter goes on from it, Esc leaves"
    hint = Window(FormattedTextControl([("italic", keys)]), wrap_lines=True, dont_extend_height=True)
    gap = Window(height=1)
    application: Application[bool] = Application(
        layout=Layout(HSplit([text, gap, choices, hint])),
        key_bindings=_keys(picker),
        erase_when_done=True,
    )
    application.ttimeoutlen = application.timeoutlen = 0.1  # recognizes Esc alone
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


def _wrapped(pieces: Sequence[str], width: int) -> list[str]:
    """Return the pieces of a text with line feeds in place of the spaces at which lines must end."""
    text = list("".join(pieces))
    column, space, begin = 0, -1, 0     # `space` is the last space of the line, `begin` the column after it
    for index, char in enumerate(text):
        if char == "\n":
            column, space = 0, -1
            continue
        column += cell_len(char)
        if char == " ":
            space, begin = index, column
        if column > width and space >= 0:
            text[space] = "\n"
            column, space = column - begin, -1
    ends = accumulate(map(len, pieces))
    return ["".join(text[end - len(piece) : end]) for piece, end in zip(pieces, ends, strict=True)]


def _shown(text: str) -> str:
    """Return the text of a token with visible whitespace."""
    return text.replace("\n", "⏎").replace("\t", "⇥") if text.strip(" ") else "␣" * len(text) or "·"


def _style(probability: float) -> str:
    if probability >= _SURE:
        return ""
    return "ansiyellow" if probability >= _SURE / 5 else "ansired"


def beginning_text(model: OpenedModel, token_ids: Sequence[int]) -> tuple[str, bool]:
    """Return the text of the beginning of an answer, and whether its last token ends the answer.

    Raises:
        InvalidRequest: the last token is an incomplete character.
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
        """Return the text that a token adds after another token; None: at the beginning of a text.

        A token that is an incomplete character adds U+FFFD.
        """
        if previous is None:
            return self._decode((token_id,))
        before, both = self._decode((previous,)), self._decode((previous, token_id))
        return both[len(before) :] if both.startswith(before) else self._decode((token_id,))

    def all_after(self, pairs: Sequence[tuple[int | None, int]]) -> list[str]:
        """Return the result of `after` for each pair."""
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return list(threads.map(lambda pair: self.after(*pair), pairs))

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the texts of the tokens of one text."""
        return self.all_after(list(zip([None, *token_ids], token_ids, strict=False)))
