"""The README's Python, run as it stands but for the address and the model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from genserve import LLM
from genserve.server.routes import (
    bundled_pages,
    docs_page,
    health,
    messages,
    ollama,
    openai,
    openai_completions,
    responses,
    tgi,
    tokenize,
)

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def block_with(words: str) -> str:
    [block] = [block for block in BLOCKS if words in block]
    return block


@pytest.mark.parametrize("block", [block for block in BLOCKS if "from genserve import" in block])
def test_the_sdk_examples_run(block, tiny_server, tiny_repository, capsys):
    code = block.replace("http://127.0.0.1:8000", tiny_server.url)
    code = code.replace('LLM("smollm2")', f'LLM("tiny", model_repository="{tiny_repository}")')
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_decoding_loop_answers_as_greedy_does(tiny_repository, tmp_path):
    with LLM(model_repository=tiny_repository) as llm:
        expected = llm.generate("hello", max_tokens=12, ignore_eos=True)
    copy = shutil.copytree(tiny_repository, tmp_path / "repository")
    (copy / "tiny_decoder" / "1" / "model.py").write_text(block_with("TritonPythonModel"))
    with LLM(model_repository=copy) as llm:
        assert llm.generate("hello", max_tokens=12, ignore_eos=True) == expected


def test_the_routes_that_it_names_are_there():
    dialects = (messages, ollama, openai, openai_completions, responses, tgi, tokenize)
    modules = (bundled_pages, docs_page, health, *dialects)
    routes = {route.path for module in modules for route in module.router.routes}
    [clients] = re.findall(r"## Clients\n(.*?)\n## ", README, flags=re.DOTALL)
    named = {path for path in re.findall(r"`(/[^`]*)`", clients) if not path.startswith("/v2/")}
    assert len(named) > 20
    assert named <= routes
