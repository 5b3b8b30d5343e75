"""A chat template that never ends: it costs its own model's requests only."""

from __future__ import annotations

import json
import shutil
import threading

import httpx2
import pytest

from tests.support.live_server import LiveServer
from tests.support.representatives import with_extended

HOSTILE = {
    "a loop in a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{% for i in range(99999) %}{{ 'abcdefghij' }}{% endfor %}",
}


@pytest.fixture(scope="module")
def server(tiny_repository, tmp_path_factory, endless_templates_end_soon):
    root = tmp_path_factory.mktemp("templates") / "repository"
    shutil.copytree(tiny_repository, root)
    for part in ("", "_tokenizer", "_logits", "_decoder"):
        folder = root / f"bad{part}"
        shutil.copytree(root / f"tiny{part}", folder)
        config = folder / "config.pbtxt"
        config.write_text(config.read_text().replace('"tiny', '"bad'))
    files = root / "bad_tokenizer" / "1"
    # The first message chooses what the template does.
    cases = "".join(
        f"{{% if messages[0].content == {json.dumps(name)} %}}{source}{{% endif %}}"
        for name, source in HOSTILE.items()
    )
    config = json.loads((files / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (files / "tokenizer_config.json").write_text(json.dumps(config))
    (files / "chat_template.jinja").write_text(cases + "{{ messages[0].content }}")
    with LiveServer(root) as live:
        yield live


def chat(server, model: str, content: str) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("name", with_extended(HOSTILE, always=list(HOSTILE)[:1]))
def test_a_template_without_an_end_fails_its_own_request_only(server, name):
    answers = []
    hostile = threading.Thread(target=lambda: answers.append(chat(server, "bad", name)))
    hostile.start()
    for _ in range(3):
        assert chat(server, "tiny", "hello").status_code == 200
    hostile.join()
    [answer] = answers
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "model_failed"
    assert chat(server, "bad", "hello").status_code == 200
