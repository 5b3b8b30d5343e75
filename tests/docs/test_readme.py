"""The routes that the README names."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_the_routes_that_it_names_are_there():
    dialects = (messages, ollama, openai, openai_completions, responses, tgi, tokenize)
    modules = (bundled_pages, docs_page, health, *dialects)
    routes = {route.path for module in modules for route in module.router.routes}
    [clients] = re.findall(r"## Clients\n(.*?)\n## ", README, flags=re.DOTALL)
    named = {path for path in re.findall(r"`(/[^`]*)`", clients) if not path.startswith("/v2/")}
    assert len(named) > 20
    assert named <= routes
