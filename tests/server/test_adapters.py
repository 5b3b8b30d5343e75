"""A server with adapters, which are models of their own: named by every dialect, loaded and unloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from genserve.export import SilentProgress, export_model
from genserve.llm import LLM
from tests.export.adapters import write_adapter
from tests.support.live_server import LiveServer, wait_until

NAMES = ("tiny", "pirate", "poet")
PROMPT = "hello there, how are you? " * 3  # more than a block of the prefix cache
SAID = "hello there"
TALK = [{"role": "user", "content": SAID}]
SEARCH = {"use_beam_search": True, "beam_width": 3}
TARGETS = ("q_proj", "v_proj", "down_proj")


def adapter_model(root: Path, name: str, adapter: Path, *, base: str = "tiny") -> Path:
    """Make the model folder of an adapter."""
    folder = root / name
    shutil.copytree(adapter, folder / "1")
    (folder / "config.pbtxt").write_text(
        f'backend: "adapter"\nparameters {{ key: "base_model" value {{ string_value: "{base}" }} }}\n'
    )
    return folder


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of PEFT for the tiny model, by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, tiny_checkpoint, targets=TARGETS, seed=seed)
        for seed, name in enumerate(("pirate", "poet", "clown"))
    }


@pytest.fixture(scope="module")
def root(tiny_repository: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tiny model and two adapters."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(tiny_repository, root, dirs_exist_ok=True)
    for name in ("pirate", "poet"):
        adapter_model(root, name, adapters[name])
    return root


@contextmanager
def serving(root: Path, **settings: Any) -> Iterator[httpx2.Client]:
    with LiveServer(root, **settings) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def http(root: Path) -> Iterator[httpx2.Client]:
    with serving(root) as client:
        yield client


@pytest.fixture
def repository(root: Path, tmp_path: Path) -> Path:
    """A repository that a test may change."""
    return Path(shutil.copytree(root, tmp_path / "repository"))


@pytest.fixture
def explicit(repository: Path) -> Iterator[httpx2.Client]:
    """A client of a server whose models are loaded by requests, all of them at the start."""
    with serving(repository, model_control_mode="explicit", load_model=NAMES) as client:
        yield client


@pytest.fixture(scope="module")
def rejecting(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx2.Client, Path]]:
    """A client of a server that loads no more models, and its repository."""
    repository = Path(shutil.copytree(root, tmp_path_factory.mktemp("rejecting") / "repository"))
    with serving(repository, model_control_mode="explicit", load_model=NAMES) as client:
        yield client, repository


def complete(http: httpx2.Client, model: str | None, prompt: str = PROMPT, **fields: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def answers(http: httpx2.Client) -> list[str]:
    return [complete(http, name) for name in NAMES]


# By dialect: the path, the body, and where the answer is, for a model's name.
def openai_chat(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    body = {"model": name, "messages": TALK, "max_tokens": 8, "temperature": 0}
    return "/v1/chat/completions", body, ["choices", 0, "message", "content"]


def responses(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    body = {"model": name, "input": SAID, "max_output_tokens": 8, "temperature": 0}
    return "/v1/responses", body, ["output", 0, "content", 0, "text"]


def anthropic(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    body = {"model": name, "messages": TALK, "max_tokens": 8, "temperature": 0}
    return "/v1/messages", body, ["content", 0, "text"]


def gemini(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    body = {
        "contents": [{"role": "user", "parts": [{"text": SAID}]}],
        "generationConfig": {"maxOutputTokens": 8, "temperature": 0},
    }
    path = f"/v1beta/models/{name}:generateContent"
    return path, body, ["candidates", 0, "content", "parts", 0, "text"]


def ollama(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    options = {"num_predict": 8, "temperature": 0}
    body = {"model": name, "messages": TALK, "stream": False, "options": options}
    return "/api/chat", body, ["message", "content"]


CHATS = (openai_chat, responses, anthropic, gemini, ollama)


def tgi(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    adapter = {} if name == "tiny" else {"adapter_id": name}
    return "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, **adapter}}, ["generated_text"]


def triton(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    body = {"text_input": PROMPT, "max_tokens": 8}
    return f"/v2/models/{name}/generate", body, ["text_output"]


def triton_vllm(name: str) -> tuple[str, dict[str, Any], list[Any]]:
    parameters = {"lora_name": "" if name == "tiny" else name}
    body = {"text_input": PROMPT, "max_tokens": 8, "parameters": parameters}
    return "/v2/models/tiny/generate", body, ["text_output"]


TEXTS = (tgi, triton, triton_vllm)


def answer(http: httpx2.Client, dialect: Any, name: str) -> str:
    path, body, place = dialect(name)
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    for part in place:
        found = found[part]
    return str(found)


def test_the_name_of_an_adapter_is_a_model_in_each_dialect_with_chats(http):
    by_dialect = [[answer(http, dialect, name) for name in NAMES] for dialect in CHATS]
    assert len({*by_dialect[0]}) == 3
    assert by_dialect == [by_dialect[0]] * len(CHATS)


def test_tgi_and_triton_name_an_adapter_by_their_parameters(http):
    expected = answers(http)
    assert len({*expected}) == 3
    assert [[answer(http, dialect, name) for name in NAMES] for dialect in TEXTS] == [expected] * len(TEXTS)


def test_answers_are_those_of_the_merged_export(http, tiny_checkpoint, adapters, tmp_path):
    for name in NAMES[1:]:
        export_model(
            str(tiny_checkpoint),
            repository=tmp_path,
            name=name,
            precision="fp32",
            adapters=[adapters[name]],
            progress=SilentProgress(),
        )
        with LLM(name, model_repository=tmp_path) as llm:
            merged = llm.generate(PROMPT, max_tokens=8, temperature=0).text
            searched = llm.generate(PROMPT, max_tokens=8, **SEARCH).text
        base = complete(http, "tiny")  # whose blocks are cached
        assert complete(http, name) == merged
        assert complete(http, name, **SEARCH) == searched
        assert complete(http, "tiny") == base


def test_without_a_model_the_base_answers(http):
    assert complete(http, None) == complete(http, "tiny")


@pytest.mark.parametrize("dialect", [*CHATS, *TEXTS])
def test_an_unknown_adapter_is_not_found(http, dialect):
    path, body, _ = dialect("nobody")
    # As in Triton, the error of a model that exists is 400.
    assert http.post(path, json=body).status_code == (400 if dialect is triton_vllm else 404)


def test_lists_have_the_adapters_with_their_base(http):
    assert {name: model.get("parent") for name, model in listed(http).items()} == {
        "tiny": None,
        "pirate": "tiny",
        "poet": "tiny",
    }
    tags = {tag["name"]: tag["details"]["parent_model"] for tag in http.get("/api/tags").json()["models"]}
    assert tags == {"tiny:latest": "", "pirate:latest": "tiny:latest", "poet:latest": "tiny:latest"}
    index = {line["name"]: line for line in http.post("/v2/repository/index").json()}
    assert index["poet"]["state"] == "READY"
    config = http.get("/v2/models/poet/config").json()
    assert config["parameters"] == {"base_model": {"string_value": "tiny"}}
    assert http.get("/v2/models/poet").json()["inputs"] == http.get("/v2/models/tiny").json()["inputs"]


def test_statistics_count_an_adapter_under_its_name(http):
    def count(name: str) -> int:
        return http.get(f"/v2/models/{name}/stats").json()["model_stats"][0]["inference_count"]

    answer(http, triton, "tiny")
    before = count("poet")
    for _ in range(3):
        answer(http, triton, "poet")
    # An inference is counted after its response is sent, which that of an earlier test may be as well.
    wait_until(lambda: count("poet") >= before + 3)


def listed(http: httpx2.Client) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in http.get("/v1/models").json()["data"]}


def index_of(http: httpx2.Client, name: str) -> dict[str, str]:
    [line] = [line for line in http.post("/v2/repository/index").json() if line["name"] == name]
    return line


def load(http: httpx2.Client, name: str) -> httpx2.Response:
    return http.post(f"/v2/repository/models/{name}/load")


def unload(http: httpx2.Client, name: str) -> httpx2.Response:
    return http.post(f"/v2/repository/models/{name}/unload")


def test_an_adapter_is_unloaded_and_loaded_alone(explicit):
    expected = answers(explicit)
    assert unload(explicit, "poet").status_code == 200
    wait_until(lambda: index_of(explicit, "poet")["state"] == "UNAVAILABLE")
    body = {"model": "poet", "prompt": PROMPT, "max_tokens": 1}
    assert explicit.post("/v1/completions", json=body).status_code == 503
    assert [complete(explicit, name) for name in ("tiny", "pirate")] == expected[:2]
    assert load(explicit, "poet").status_code == 200
    assert answers(explicit) == expected


def test_a_stream_goes_on_while_its_adapter_is_unloaded(explicit):
    fields = {"max_tokens": 120, "ignore_eos": True}
    whole = complete(explicit, "poet", **fields)
    body = {"model": "poet", "prompt": PROMPT, "temperature": 0, "stream": True, **fields}
    text, is_unloaded = "", False
    with explicit.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if not is_unloaded:
                is_unloaded = unload(explicit, "poet").status_code == 200
    assert text == whole
    wait_until(lambda: index_of(explicit, "poet")["state"] == "UNAVAILABLE")


def test_new_files_change_the_answers(explicit, repository, adapters):
    expected = answers(explicit)
    shutil.copy(adapters["clown"] / "adapter_model.safetensors", repository / "poet" / "1")
    assert load(explicit, "poet").status_code == 200
    new = answers(explicit)
    assert new[:2] == expected[:2]
    assert new[2] not in expected
    shutil.copy(adapters["poet"] / "adapter_model.safetensors", repository / "poet" / "1")
    assert load(explicit, "poet").status_code == 200
    assert answers(explicit) == expected


def test_adapters_follow_their_base(explicit, repository):
    expected = answers(explicit)
    assert unload(explicit, "tiny").status_code == 200
    wait_until(lambda: index_of(explicit, "poet")["state"] == "UNAVAILABLE")
    body = {"model": "poet", "prompt": PROMPT, "max_tokens": 1}
    response = explicit.post("/v1/completions", json=body)
    assert response.status_code == 503
    assert "base" in response.json()["error"]["message"]
    assert load(explicit, "tiny").status_code == 200
    assert answers(explicit) == expected
    (repository / "tiny_decoder" / "1" / "notes.txt").write_text("new")  # the base is loaded again
    assert load(explicit, "tiny").status_code == 200
    assert answers(explicit) == expected


def test_an_adapter_that_does_not_fit_a_new_base_is_not_ready(explicit, repository, adapters):
    expected = answers(explicit)
    (repository / "poet" / "1" / "adapter_model.safetensors").write_bytes(b"bad")
    shutil.rmtree(repository / "pirate")
    (repository / "tiny_decoder" / "1" / "notes.txt").write_text("new")
    assert load(explicit, "tiny").status_code == 200
    body = {"model": "poet", "prompt": PROMPT, "max_tokens": 1}
    assert explicit.post("/v1/completions", json=body).status_code == 503
    assert explicit.post("/v1/completions", json={**body, "model": "pirate"}).status_code == 404
    shutil.copy(adapters["poet"] / "adapter_model.safetensors", repository / "poet" / "1")
    assert load(explicit, "poet").status_code == 200
    assert complete(explicit, "poet") == expected[2]


def test_loading_an_adapter_loads_its_base(repository):
    with serving(repository, model_control_mode="explicit", load_model=("poet",)) as http:
        assert complete(http, None) == complete(http, "poet") != complete(http, "tiny")
        body = {"parameters": {"unload_dependents": True}}
        response = http.post("/v2/repository/models/poet/unload", json=body)
        assert response.status_code == 200
        wait_until(lambda: index_of(http, "tiny")["state"] == "UNAVAILABLE")


def test_an_adapter_that_does_not_fit_is_rejected_alone(explicit, repository):
    expected = answers(explicit)
    (repository / "poet" / "1" / "adapter_model.safetensors").write_bytes(b"bad")
    response = load(explicit, "poet")
    assert response.status_code == 400
    assert "poet" in response.json()["error"]
    assert answers(explicit) == expected  # the old one answers


@pytest.mark.parametrize("base", ["nobody", "tiny_logits", "pirate", ""])
def test_a_base_that_is_no_text_model_is_rejected(rejecting, adapters, base):
    http, repository = rejecting
    adapter_model(repository, f"of_{base}", adapters["poet"], base=base)
    assert load(http, f"of_{base}").status_code == 400


def test_polling_loads_new_adapters_and_unloads_removed_ones(repository, adapters):
    with serving(repository, model_control_mode="poll", repository_poll_s=0.1) as http:
        adapter_model(repository, "clown", adapters["clown"])
        shutil.rmtree(repository / "poet")
        wait_until(lambda: {*listed(http)} == {"tiny", "pirate", "clown"})
        assert complete(http, "clown") != complete(http, "tiny")


def test_on_demand_an_adapter_is_loaded_with_its_base(repository):
    with serving(repository, model_control_mode="on-demand") as http:
        poet = listed(http)["poet"]
        assert poet["parent"] == "tiny"
        assert poet["status"]["value"] == "unloaded"
        assert len({*answers(http)}) == 3
        shown = http.post("/api/show", json={"model": "poet"}).json()
        assert shown["details"]["parent_model"] == "tiny:latest"


def load_adapter(http: httpx2.Client, **fields: Any) -> httpx2.Response:
    return http.post("/v1/load_lora_adapter", json=fields)


def test_vllms_routes_load_and_unload_a_folder(explicit, adapters):
    folder = str(adapters["clown"])
    response = load_adapter(explicit, lora_name="clown", lora_path=folder)
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'clown' added successfully."
    text = complete(explicit, "clown")
    assert text not in answers(explicit)
    again = load_adapter(explicit, lora_name="clown", lora_path=folder)
    assert again.status_code == 400
    other = str(adapters["poet"])
    assert load_adapter(explicit, lora_name="clown", lora_path=other, load_inplace=True).status_code == 200
    assert complete(explicit, "clown") == complete(explicit, "poet")
    response = explicit.post("/v1/unload_lora_adapter", json={"lora_name": "clown"})
    assert response.text == "Success: LoRA adapter 'clown' removed successfully."
    body = {"model": "clown", "prompt": PROMPT}
    assert explicit.post("/v1/completions", json=body).status_code == 404
    assert explicit.post("/v1/unload_lora_adapter", json={"lora_name": "clown"}).status_code == 404


def test_an_adapter_of_vllms_route_follows_its_base(explicit, repository, adapters):
    assert load_adapter(explicit, lora_name="clown", lora_path=str(adapters["clown"])).status_code == 200
    text = complete(explicit, "clown")
    (repository / "tiny_decoder" / "1" / "notes.txt").write_text("new")
    assert load(explicit, "tiny").status_code == 200
    assert complete(explicit, "clown") == text


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"lora_name": "new"}, 400),
        ({"lora_name": "", "lora_path": "/"}, 400),
        ({"lora_name": "new", "lora_path": "/nowhere"}, 404),
        ({"lora_name": "new", "lora_path": "x" * 5000}, 404),
        ({"lora_name": "new", "lora_path": "\0"}, 404),
        ({"lora_name": "../new", "lora_path": "{adapter}"}, 400),
        ({"lora_name": "x" * 300, "lora_path": "{adapter}"}, 400),
        ({"lora_name": "tiny", "lora_path": "/", "load_inplace": True}, 400),
    ],
)
def test_vllms_route_rejects_what_it_cannot_load(rejecting, adapters, fields, status):
    folder = str(adapters["clown"])
    fields = {name: folder if one == "{adapter}" else one for name, one in fields.items()}
    assert load_adapter(rejecting[0], **fields).status_code == status


def test_vllms_routes_need_a_key_that_may_control(root, adapters):
    fields = {"lora_name": "clown", "lora_path": str(adapters["clown"])}
    settings = {"model_control_mode": "explicit", "load_model": ("tiny",)}
    with serving(root, api_key="user", control_key="admin", **settings) as http:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            headers = {"Authorization": "Bearer user"}
            assert http.post(path, json=fields, headers=headers).status_code == 403
            headers = {"Authorization": "Bearer admin"}
            assert http.post(path, json=fields, headers=headers).status_code == 200


def test_vllms_route_needs_models_that_requests_may_load(http, adapters):
    fields = {"lora_name": "clown", "lora_path": str(adapters["clown"])}
    assert load_adapter(http, **fields).status_code == 503


def test_vllms_route_rejects_an_adapter_for_another_base(rejecting, adapters):
    fields = {"lora_name": "new", "lora_path": str(adapters["clown"])}
    assert load_adapter(rejecting[0], **fields, base_model_name="tiny_logits").status_code == 400
