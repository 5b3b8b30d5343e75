"""The alternatives of answers of a tiny model, in process and on a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from genserve.cli.chat.alternatives import (
    ScoredAnswer,
    TokenPicker,
    TokenTexts,
    beginning_text,
    score_last_answer,
)
from genserve.cli.chat.chat_session import ChatSession
from genserve.cli.chat.conversation import Conversation, Exchange
from genserve.cli.chat.slash_commands import run_slash
from genserve.cli.flags import RemoteServer
from genserve.cli.opened_models import ModelSwitch, OpenedModel, open_model
from genserve.completion import TokenLogprob
from genserve.errors import InvalidRequest
from genserve.prompt import Chat
from genserve.sampling.sampling_options import SamplingOptions
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, PROMPT, Terminal
from tests.support.live_server import LiveServer


@pytest.fixture(scope="module")
def local(tiny_repository: Path) -> Iterator[OpenedModel]:
    with open_model("tiny", repository=tiny_repository, server=None) as opened:
        yield opened


@pytest.fixture(scope="module", params=["local", "remote"])
def opened(request: pytest.FixtureRequest, local, tiny_server: LiveServer):
    if request.param == "local":
        yield local
    else:
        server = RemoteServer(url=tiny_server.url, verify=True)
        with open_model("tiny", repository=None, server=server) as remote:
            yield remote


def chat_with(opened: OpenedModel) -> ChatSession:
    return ChatSession(
        ModelSwitch(lambda _name: nullcontext(opened), names=lambda: ["tiny"]),
        model=None,
        conversation=Conversation(system="Be brief."),
        initial_options=lambda _opened: SamplingOptions(temperature=0.0, max_tokens=8, ignore_eos=True),
    )


def test_each_token_has_its_alternatives(opened) -> None:
    session = chat_with(opened)
    session.ask("one")
    answer = session.ask("two")
    scored = score_last_answer(session.model, session.conversation)
    assert scored.token_ids == answer.token_ids
    assert [score.top[0][0] for score in scored.scores] == list(answer.token_ids)  # the answer is greedy
    assert all(len(score.top) == 8 for score in scored.scores)


def test_an_answer_goes_on_from_an_alternative(opened) -> None:
    session = chat_with(opened)
    letters = opened.text_model.tokenize("abcdef", add_special_tokens=False)
    session.options["allowed_token_ids"] = letters
    answer = session.ask("one")
    beginning = (*answer.token_ids[:3], letters[-1])
    text, is_whole = beginning_text(session.model, beginning)
    assert not is_whole
    session.continue_from(text, beginning)
    last = session.conversation.last
    assert last is not None
    assert last.question == "one"
    assert last.answer.startswith(text)
    assert len(session.conversation) == 1
    # As the continuation of these very tokens.
    prompt_ids = opened.text_model.tokenize(Chat(messages=tuple(session.conversation.messages()[:-1])))
    [expected] = opened.text_model.complete([[*prompt_ids, *beginning]], **session.options)
    assert last.token_ids == beginning + expected.token_ids


def test_a_special_token_ends_the_answer(opened) -> None:
    [end] = opened.text_model.tokenize("<|im_end|>", add_special_tokens=False)
    [letter] = opened.text_model.tokenize("a", add_special_tokens=False)
    assert beginning_text(opened, (letter, end)) == ("a", True)
    assert beginning_text(opened, (end, letter)) == ("a", False)


def test_a_part_of_a_character_is_no_beginning(opened) -> None:
    first, *_ = opened.text_model.tokenize("🙂", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="a part of a character"):
        beginning_text(opened, (first,))


def test_a_loaded_answer_is_tokenized(opened) -> None:
    session = chat_with(opened)
    with pytest.raises(InvalidRequest, match="there is no answer yet"):
        score_last_answer(session.model, session.conversation)
    session.conversation.add(Exchange(question="one", answer="größer"))
    scored = score_last_answer(session.model, session.conversation)
    assert opened.text_model.detokenize(scored.token_ids) == "größer"
    session.conversation.add(Exchange(question="one", answer=""))
    with pytest.raises(InvalidRequest, match="the last answer is empty"):
        score_last_answer(session.model, session.conversation)


def test_tokens_of_a_text_are_shown(opened, capsys: pytest.CaptureFixture[str]) -> None:
    session = chat_with(opened)
    run_slash(session, "/tokens größer there")
    count = len(opened.text_model.tokenize("größer there", add_special_tokens=False))
    assert capsys.readouterr().out.endswith(f"\n{count} tokens\n")


def test_the_picker_moves_over_tokens_and_alternatives(local) -> None:
    ids = local.text_model.tokenize("a b", add_special_tokens=False)
    sure, unsure = (
        TokenLogprob(logprob=value, top=((ids[0], value), (ids[1], -5.0))) for value in (-0.1, -3.0)
    )
    picker = TokenPicker(
        ScoredAnswer(token_ids=(*ids, ids[0])[:3], scores=(sure, unsure, sure)), TokenTexts(local.text_model)
    )
    assert picker.place == 1  # the first one that is not sure
    picker.choose(-1)
    assert picker.choice == 1
    shown = "".join(text for _, text, *_ in picker.alternative_fragments()).splitlines()
    assert [line[0] for line in shown] == [" ", "▸"]
    assert shown[0].split()[:2] == ["5.0%", "a"]
    picker.move(5)
    assert (picker.place, picker.choice) == (2, 0)
    picker.move_to_unsure(-1)
    picker.move_to_unsure(-1)
    assert picker.place == 1
    styles = [style for style, text, *_ in picker.answer_fragments(width=80) if text]
    assert styles == ["", "reverse", ""]


def test_the_token_of_the_answer_is_among_the_choices(local) -> None:
    ids = local.text_model.tokenize("a b", add_special_tokens=False)
    score = TokenLogprob(logprob=-9.0, top=((ids[0], -0.1),))
    answer = ScoredAnswer(token_ids=(ids[1],), scores=(score,))
    picker = TokenPicker(answer, TokenTexts(local.text_model))
    shown = "".join(text for _, text, *_ in picker.alternative_fragments()).splitlines()
    assert [line[:2] for line in shown] == ["▸ ", " •"]
    picker.choose(1)
    assert answer.beginning(0, picker.choice) == (ids[1],)


def test_the_answer_is_wrapped_between_words(local) -> None:
    ids = local.text_model.tokenize(" some more words", add_special_tokens=False)
    score = TokenLogprob(logprob=-0.1, top=((ids[0], -0.1),))
    picker = TokenPicker(
        ScoredAnswer(token_ids=ids, scores=(score,) * len(ids)), TokenTexts(local.text_model)
    )
    for place in range(len(ids)):
        picker.move(place - picker.place)
        shown = "".join(text for _, text, *_ in picker.answer_fragments(width=10))
        assert [line.replace("␣", " ").strip() for line in shown.splitlines()] == ["some more", "words"]


def test_the_user_picks_an_alternative_or_leaves(tmp_path: Path) -> None:
    with Terminal("tests.cli.chat_on_terminal", home=tmp_path, columns=80) as terminal:
        terminal.expect(PROMPT)
        terminal.type("/alt" + ENTER)
        terminal.expect("there is no answer yet")
        terminal.expect(PROMPT)
        terminal.type("one two three" + ENTER)
        terminal.expect("ONE TWO THREE")
        for key in (CTRL_C, CTRL_D, "q"):
            terminal.expect(PROMPT)
            terminal.type("/alt" + ENTER)
            terminal.expect_screen(lambda lines: any("10.0%  OTHER" in line for line in lines))
            terminal.type(key)
        terminal.expect(PROMPT)
        terminal.type("/alt" + ENTER)
        terminal.expect_screen(lambda lines: any("10.0%  OTHER" in line for line in lines))
        terminal.type("\x1b[C" + "\x1b[B")
        terminal.expect_screen(lambda lines: any("▸   10.0%   OTHER" in line for line in lines))
        terminal.type(ENTER)
        terminal.expect_screen(lambda lines: any("ONE OTHERAND ON" in line for line in lines))
        terminal.expect(PROMPT)
        terminal.type("last" + ENTER)
        terminal.expect("LAST")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        terminal.expect("last asked: ['one two three', 'ONE OTHERAND ON', 'last']")
        assert terminal.wait() == 0
        assert terminal.modes() == terminal.modes_before
