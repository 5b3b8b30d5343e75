from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genserve.export import KNOWN_MODELS
from genserve.kernels import instruction_set
from tests.cli.test_model_choice import add_model
from tests.client.scripted_server import models_reply, scripted
from tests.support.command_line import invoke


def test_the_models_of_a_repository_are_a_table(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    quality = {"top1_agreement": 0.9479, "perplexity_ratio": 1.0109, "divergence": 0.01526}
    parity = {"precision": "int8"} | quality
    (tmp_path / "a_logits" / "1" / "parity.json").write_text(json.dumps(parity))
    add_model(tmp_path, "b", weights=False)
    add_model(tmp_path, "c")
    (tmp_path / "c_logits" / "1" / "parity.json").write_text(json.dumps(parity | {"kv_cache": "int8"}))
    result = invoke(["models", "--model-repository", str(tmp_path)])
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert rows[-1] == f"in {tmp_path}; kernels of this machine: {instruction_set()}"
    assert rows[:-2] == [
        "model size precision top-1 perplexity KL state",
        "a 0.0 MB int8 94.8% x1.011 0.0153 ready to load",
        "b 0.0 MB no weights: b_tokenizer, b_logits",
        "c 0.0 MB int8+kv8 94.8% x1.011 0.0153 ready to load",
    ]


def test_the_quality_is_that_of_the_configured_graph(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    config = tmp_path / "a_logits" / "config.pbtxt"
    config.write_text(config.read_text() + ' default_model_filename: "int4/model.onnx"')
    for folder, agreement in ((".", 0.9479), ("int4", 0.7)):
        path = tmp_path / "a_logits" / "1" / folder / "parity.json"
        path.parent.mkdir(exist_ok=True)
        rest = {"precision": "x", "perplexity_ratio": 1, "divergence": 0}
        path.write_text(json.dumps(rest | {"top1_agreement": agreement}))
    assert "70.0%" in invoke(["models", "--model-repository", str(tmp_path)]).stdout


def test_the_models_of_a_server_are_one_per_line() -> None:
    with scripted(models_reply("a", "b")) as server:
        assert invoke(["models", "--url", server.url]).stdout == "a\nb\n"


def test_the_remedy_for_an_empty_repository_is_pull(tmp_path: Path) -> None:
    result = invoke(["models", "--model-repository", str(tmp_path)])
    assert "no text model" in result.stdout
    assert f"genserve pull smollm2 --model-repository {tmp_path}" in result.stdout


def test_json_has_the_models_with_their_numbers(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    numbers = {"top1_agreement": 0.9479, "perplexity_ratio": 1.0109, "divergence": 0.01526}
    parity = {"precision": "int8"} | numbers
    (tmp_path / "a_logits" / "1" / "parity.json").write_text(json.dumps(parity))
    add_model(tmp_path, "b", weights=False)
    result = invoke(["models", "--model-repository", str(tmp_path), "--json"])
    document = json.loads(result.stdout)
    assert document["model_repository"] == str(tmp_path)
    first, second = document["models"]
    assert first["quality"] == parity | {"kv_cache": "float"}
    assert (first["name"], first["missing"]) == ("a", [])
    assert (second["name"], second["quality"], second["missing"]) == ("b", None, ["b_tokenizer", "b_logits"])


def test_json_of_a_repository_without_models_has_an_empty_list(tmp_path: Path) -> None:
    result = invoke(["models", "--model-repository", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["models"] == []


def test_json_of_a_server_has_its_models() -> None:
    with scripted(models_reply("a", "b")) as server:
        result = invoke(["models", "--url", server.url, "--json"])
    assert [model["name"] for model in json.loads(result.stdout)["models"]] == ["a", "b"]


def test_json_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    add_model(tmp_path, "t\u00e9e")
    command = [sys.executable, "-m", "genserve", "models", "--json", "--model-repository", str(tmp_path)]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert json.loads(ran.stdout)["models"][0]["name"] == "t\u00e9e"


def test_available_models_are_listed_with_sizes_and_estimates(tmp_path: Path) -> None:
    add_model(tmp_path, "qwen3-0.6b")
    flags = ["models", "--available", "--model-repository", str(tmp_path)]
    document = json.loads(invoke([*flags, "--json"]).stdout)
    rows = document["models"]
    by_name = {row["name"]: row for row in rows}
    assert by_name.keys() == KNOWN_MODELS.keys()
    assert [name for name, row in by_name.items() if row["is_installed"]] == ["qwen3-0.6b"]
    assert by_name["smollm2"]["was_run"]
    assert all(row["estimated_tokens_per_s_of_32"] > row["estimated_tokens_per_s"] > 0 for row in rows)
    lines = invoke(flags).stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : len(rows) + 1]] == list(KNOWN_MODELS)
    encoders = [(row["name"], row["size"], row["is_installed"]) for row in document["encoders"]]
    assert encoders == [("all-minilm-l6-v2", 384, False)]
    assert lines[-1].split()[0] == "all-minilm-l6-v2"


def test_available_models_fit_into_a_terminal_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    shown = invoke(["models", "--available", "--model-repository", str(tmp_path)]).stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80] == []
    assert " ".join(lines[0].split()) == "model weights download memory context tokens/s of 32"
    assert "qwen3-0.6b: a first useful chat; tools, reasoning, many languages. Apache-2.0." in lines
