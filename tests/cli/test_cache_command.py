from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from genserve.errors import InvalidRequest, RepositoryError
from genserve.llm import LLM
from tests.support.command_line import Ended, check_error, invoke

SYSTEM = "You are a librarian, and name the shelf of each book."
TOOLS = [{"type": "function", "function": {"name": "shelf_of", "parameters": {"type": "object"}}}]


@pytest.fixture
def repository(tiny_repository, tmp_path) -> Path:
    return shutil.copytree(tiny_repository, tmp_path / "repository")


def build(repository: Path, **files: str) -> Ended:
    words = ["cache", "build", "tiny", "--model-repository", str(repository)]
    for name, text in files.items():
        path = repository.parent / f"{name}.txt"
        path.write_text(text)
        words += [f"--{name}", str(path)]
    return invoke(words)


def num_cached(llm: LLM, *messages: dict[str, str]) -> int:
    return llm.chat(messages, max_tokens=1).usage.cached_tokens


def test_chats_with_the_system_message_start_behind_it(repository):
    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is Ulysses?"}
    with LLM("tiny", model_repository=repository) as llm:
        expected = llm.chat([system, user], max_tokens=20)
        beginning = llm.tokenize([system, {"role": "user", "content": "?"}])
    ended = build(repository, system=SYSTEM)
    assert (ended.exit_code, ended.stderr) == (0, "")
    with LLM("tiny", model_repository=repository) as llm:
        answer = llm.chat([system, user], max_tokens=20)
        assert answer.token_ids == expected.token_ids
        computed = answer.usage.cached_tokens
        assert f"computed the first {computed} tokens" in ended.stdout
        # Behind the question mark are the end of the turn and the beginning of the next.
        assert len(beginning) - 40 < computed < len(beginning)
        assert num_cached(llm, {"role": "system", "content": "Be a pirate."}, user) == 0
    ended = invoke(["check", str(repository), "--strict"])
    assert ended.exit_code == 0, ended.stdout


@pytest.mark.parametrize("source", ["tiny_repository", "hybrid_repository"])
def test_a_text_is_computed_as_it_is(request, tmp_path, source):
    repository = shutil.copytree(request.getfixturevalue(source), tmp_path / "repository")
    text = "It was the best of times, it was the worst of times. " * 2
    assert build(repository, prompt=text).exit_code == 0
    with LLM("tiny", model_repository=repository) as llm:
        num_tokens = len(llm.tokenize(text))
        assert llm.generate(text + "And", max_tokens=1).usage.cached_tokens == num_tokens // 16 * 16


def test_prefixes_of_several_prompts_are_kept(repository):
    assert build(repository, system=SYSTEM).exit_code == 0
    assert build(repository, prompt="x" * 50).exit_code == 0
    with LLM("tiny", model_repository=repository) as llm:
        assert llm.generate("x" * 60, max_tokens=1).usage.cached_tokens > 0
        assert num_cached(llm, {"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}) > 0


@pytest.mark.parametrize("files", [{}, {"system": SYSTEM, "prompt": "x"}])
def test_the_files_are_those_of_a_chat_or_of_a_text(repository, files):
    ended = build(repository, **files)
    assert ended.exit_code == 2
    assert "--system, --tools or both; or that of a text, --prompt" in ended.error


def test_a_prompt_shorter_than_a_block_is_rejected(repository):
    check_error(build(repository, prompt="x"), InvalidRequest, "1 tokens in common, and a block .* holds 16")
    assert not list(repository.rglob("prefixes"))


def test_a_file_that_is_not_valid_is_rejected_before_the_model_is_loaded(repository):
    shutil.rmtree(repository / "tiny_logits" / "1")
    check_error(build(repository, tools="{"), InvalidRequest, "tools.txt is not JSON")
    check_error(build(repository, tools='{"a": 1}'), InvalidRequest, "tools")
    ended = invoke(["cache", "build", "tiny", "--system", str(repository / "none")])
    check_error(ended, InvalidRequest, "none cannot be read: No such file")


def test_a_model_that_stores_nothing_is_an_error(repository):
    config = repository / "tiny_logits" / "config.pbtxt"
    config.write_text(
        config.read_text() + '\nparameters { key: "prefix_cache" value { string_value: "false" } }\n'
    )
    check_error(build(repository, system=SYSTEM), RepositoryError, "no block of 'tiny' was written")


def test_a_prefix_that_is_not_written_whole_is_an_error_until_it_is(repository, monkeypatch):
    with monkeypatch.context() as disk:
        disk.setattr("genserve.engine.disk_cache._MAX_UNWRITTEN_BYTES", 3 << 12)     # a very slow one
        ended = build(repository, system=SYSTEM * 3)
        check_error(ended, RepositoryError, "tokens only .* were written to")
    assert build(repository, system=SYSTEM * 3).exit_code == 0
    with LLM("tiny", model_repository=repository) as llm:
        system, user = {"role": "system", "content": SYSTEM * 3}, {"role": "user", "content": "x"}
        assert num_cached(llm, system, user) > 64


def test_tools_are_part_of_the_beginning(repository):
    """The template of the tiny model shows no tools, so this one does."""
    template = repository / "tiny_tokenizer" / "1" / "chat_template.jinja"
    template.write_text("{{ tools | tojson }}" + template.read_text())
    assert build(repository, tools=json.dumps(TOOLS)).exit_code == 0
    with LLM("tiny", model_repository=repository) as llm:
        asked = [{"role": "user", "content": "x"}]
        assert llm.chat(asked, tools=TOOLS, max_tokens=1).usage.cached_tokens > 0
        assert llm.chat(asked, max_tokens=1).usage.cached_tokens == 0
