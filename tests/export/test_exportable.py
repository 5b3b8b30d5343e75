"""Checkpoints that cannot be exported are rejected before their weights are downloaded or read."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from genserve.errors import ExportError
from genserve.export import SilentProgress, export_model, pull
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.export_options import Unit
from genserve.export.families.exportable import require_exportable
from genserve.export.hub import locate
from tests.export.ggufs import write_gguf
from tests.export.quantized_folders import AWQ, Quantizer, quantized_folder
from tests.support.representatives import with_extended
from tests.support.tiny_llama import tiny_llama_checkpoint

REVISION = "0123456789abcdef0123456789abcdef01234567"
# The reason by the model type of transformers, whose defaults have the sizes of the first such model.
REFUSED = {
    "bert": ("BertForMaskedLM", "no part that generates text"),
    "dbrx": ("DbrxForCausalLM", "a mixture of experts"),
    "mllama": ("MllamaForConditionalGeneration", "an encoder of images or sound"),
    "bamba": ("BambaForCausalLM", "recurrent state"),
    "jamba": ("JambaForCausalLM", "a mixture of experts"),
    "mamba": ("MambaForCausalLM", "recurrent state"),
    "mamba2": ("Mamba2ForCausalLM", "recurrent state"),
    "minicpm3": ("MiniCPM3ForCausalLM", "compressed keys and values"),
    "paligemma": ("PaliGemmaForConditionalGeneration", "an encoder of images or sound"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "an encoder of images or sound"),
    "rwkv": ("RwkvForCausalLM", "recurrent state"),
    "t5": ("T5ForConditionalGeneration", "an encoder that reads the prompt"),
}
EXPORTED = {
    "cohere": "CohereForCausalLM", "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration", "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "granite": "GraniteForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM", "llama": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration",
    "ministral3": "Ministral3ForCausalLM", "mixtral": "MixtralForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi": "PhiForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
}  # fmt: skip


def config_of(model_type: str, architecture: str) -> dict[str, Any]:
    """Return the config of the first model of this type, which transformers has as its defaults."""
    config = AutoConfig.for_model(model_type, architectures=[architecture]).to_dict()
    if model_type == "lfm2":  # by default it has none of the layers for which it was made
        config["layer_types"][0] = "conv"
    if model_type == "granitemoehybrid":  # by default it has no other layers
        config["layer_types"][5] = "full_attention"
    return config


@pytest.mark.parametrize("model_type", REFUSED)
def test_the_refusal_names_architecture_reason_and_the_nearest_that_works(model_type: str) -> None:
    architecture, reason = REFUSED[model_type]
    with pytest.raises(ExportError) as caught:
        require_exportable(config_of(model_type, architecture), source="it")
    assert caught.value.message.startswith(f"it has the architecture {architecture} with ")
    assert reason in caught.value.message
    assert "the nearest that works: " in caught.value.remedy


@pytest.mark.parametrize("model_type", EXPORTED)
def test_other_decoders_are_not_refused(model_type: str) -> None:
    require_exportable(config_of(model_type, EXPORTED[model_type]), source="it")


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "reason"),
    [
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 32}, "no layer with"),
        ("nemotron_h", "NemotronHForCausalLM", {"moe_latent_size": 256}, "moe_latent_size 256"),
    ],
)
def test_the_refusal_of_a_known_architecture_names_what_its_family_lacks(
    model_type: str, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    """Both have experts, which are no reason."""
    with pytest.raises(ExportError, match=f"architecture {architecture}, but .*{reason}") as caught:
        require_exportable(config_of(model_type, architecture) | changes, source="it")
    assert "the nearest that works: " in caught.value.remedy


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"), ({}, "no part that generates")],
)
def test_an_unknown_architecture_is_refused(extra: dict[str, Any], reason: str) -> None:
    config = {"model_type": "phantom", "architectures": ["PhantomForCausalLM"]}
    with pytest.raises(ExportError, match=f"PhantomForCausalLM with {reason}"):
        require_exportable(config | extra, source="it")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quantized by hqq in 4 bits"),
        ({"quant_method": "aqlm"}, "quantized by aqlm,"),
        ({"bits": 4}, "by an unknown method in 4 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"by awq in 4 bits \(version gemv\)"),
        ({"quant_method": "gptq", "bits": 3}, "by gptq in 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "with a transform"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 3}}},
            },
            "compressed-tensors in 3 bits",
        ),
        ({"quant_method": "auto-round", "packing_format": "auto_round"}, "packing_format auto_round"),
        ({"quant_method": "auto-round", "bits": 4}, "by auto-round in 4 bits"),
        ("spqr", "by spqr"),
    ],
)
def test_unknown_formats_of_quantized_weights_are_refused(quantization: Any, words: str) -> None:
    config = config_of("llama", "LlamaForCausalLM") | {"quantization_config": quantization}
    with pytest.raises(ExportError, match=words) as caught:
        require_exportable(config, source="it")
    assert "float weights" in caught.value.remedy


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"config_groups": [1]}, r"config_groups is \[1\]"),
        ({"config_groups": {"a": 1}}, r"config_groups\.a is 1"),
        ({"config_groups": {"a": {"weights": "int"}}}, r"config_groups\.a\.weights is 'int'"),
        ({"sparsity_config": "dense"}, "sparsity_config is 'dense'"),
    ],
)
def test_a_description_of_quantized_weights_that_is_no_object_is_named(
    part: dict[str, Any], named: str
) -> None:
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config = config_of("llama", "LlamaForCausalLM") | {"quantization_config": method | part}
    with pytest.raises(ExportError, match=named) as caught:
        require_exportable(config, source="it")
    assert "download it again" in caught.value.remedy


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes"])
def test_known_formats_of_quantized_weights_are_accepted(method: str) -> None:
    config = config_of("llama", "LlamaForCausalLM") | {"quantization_config": {"quant_method": method}}
    require_exportable(config, source="it")


def test_quantized_weights_that_may_be_transposed_are_refused() -> None:
    config = config_of("gpt2", "GPT2LMHeadModel") | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ExportError, match="GPT2LMHeadModel with quantized weights"):
        require_exportable(config, source="it")


class Hub(ThreadingHTTPServer):
    """Stands in for the Hugging Face hub with the files of one repository, and records what is requested."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files = files
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        name = unquote(self.path.partition("/resolve/")[2].partition("/")[2])  # behind the revision
        if "/tree/" in self.path:
            sizes = {file: len(content) for file, content in self.server.files.items()}
            tree = [{"type": "file", "path": file, "size": sizes[file], "oid": file} for file in sizes]
            self._answer(json.dumps(tree).encode(), etag="tree")
        elif "/api/models/" in self.path:
            siblings = [{"rfilename": file} for file in self.server.files]
            about = {"id": "Org/Name", "sha": REVISION, "siblings": siblings, "private": False}
            self._answer(json.dumps(about).encode(), etag="about")
        elif name in self.server.files:
            if self.command == "GET":
                self.server.sent.append(name)
            self._answer(self.server.files[name], etag=name)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _answer(self, body: bytes, *, etag: str) -> None:
        self.send_response(200)
        headers = {"Content-Length": len(body), "ETag": f'"{etag}"', "X-Repo-Commit": REVISION}
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub({"model.safetensors": b"weights", "tokenizer.json": b"{}"}) as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("model_type", ["dbrx", "mllama", "t5"])
def test_of_a_refused_model_only_the_config_is_downloaded(hub: Hub, tmp_path: Path, model_type: str) -> None:
    config = config_of(model_type, REFUSED[model_type][0])
    hub.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(ExportError, match="the architecture"):
        export_model("Org/Name", repository=tmp_path / "models", name="m", progress=SilentProgress())
    assert hub.sent == ["config.json"]
    assert not (tmp_path / "models").exists()


def test_all_files_of_another_model_are_downloaded(hub: Hub) -> None:
    hub.files["config.json"] = json.dumps(config_of("llama", "LlamaForCausalLM")).encode()
    folder = locate("Org/Name")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]


_GGUFS = (
    "README.md",
    "mmproj-Tiny-Q4_K_M.gguf",
    "Tiny-Q4_K_M.gguf",
    "UD/Tiny-UD-Q4_K_M.gguf",
    "Tiny-Q4_K_S.gguf",
    "Tiny-UD-Q4_K_XL.gguf",
    "Tiny.f16.gguf",
    "Q5_K_M/Tiny-Q5_K_M-00001-of-00002.gguf",
    "Q5_K_M/Tiny-Q5_K_M-00002-of-00002.gguf",
)


@pytest.mark.parametrize(
    "prefix", with_extended(["", "hf.co/", "https://huggingface.co/"], always={"hf.co/"})
)
@pytest.mark.parametrize(
    ("quantization", "files"),
    [
        ("", ["Tiny-Q4_K_M.gguf"]),
        (":Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        (":UD-Q4_K_M", ["UD/Tiny-UD-Q4_K_M.gguf"]),
        (":Q4_K_XL", ["Tiny-UD-Q4_K_XL.gguf"]),
        (":q4_k_s", ["Tiny-Q4_K_S.gguf"]),
        (":F16", ["Tiny.f16.gguf"]),
        (":Q5_K_M", [f"Q5_K_M/Tiny-Q5_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]),
    ],
)
def test_of_gguf_files_the_wanted_one_is_downloaded(
    hub: Hub, prefix: str, quantization: str, files: list[str]
) -> None:
    hub.files = {name: name.encode() for name in _GGUFS}
    assert locate(f"{prefix}Org/Name{quantization}").as_posix().endswith(f"/{files[0]}")
    assert hub.sent == files


def test_a_single_gguf_file_needs_no_quantization(hub: Hub) -> None:
    hub.files = {"tiny.gguf": b"tiny", "mmproj.gguf": b"images"}
    assert locate("Org/Name").name == "tiny.gguf"
    assert hub.sent == ["tiny.gguf"]


def test_a_quantization_that_is_not_there_is_told_with_the_others(hub: Hub) -> None:
    hub.files = dict.fromkeys(_GGUFS, b"")
    with pytest.raises(ExportError, match="Q8_0") as caught:
        locate("Org/Name:Q8_0")
    assert "Org/Name:F16, Org/Name:Q4_K_M, Org/Name:Q4_K_S, Org/Name:Q5_K_M" in caught.value.remedy
    hub.files.pop("Tiny-Q4_K_M.gguf")
    hub.files.pop("UD/Tiny-UD-Q4_K_M.gguf")
    with pytest.raises(ExportError, match="Q4_K_M or Q8_0"):
        locate("Org/Name")


def test_a_gguf_file_is_pulled_by_its_name(hub: Hub, tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny_checkpoint, tmp_path / "tiny.gguf", kind="Q8_0")
    hub.files = {"Tiny-Q8_0.gguf": file.read_bytes()}
    report = pull(
        "hf.co/Org/Name:Q8_0", repository=tmp_path / "models", delete_download=True, progress=SilentProgress()
    )
    assert report is not None
    assert report.name == "name-q8_0"
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_a_download_is_deleted_once_the_model_is_installed(
    hub: Hub, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    hub.files = {path.name: path.read_bytes() for path in tiny_checkpoint.iterdir()}
    for name, deletes in (("kept", False), ("deleted", True)):
        export_model(
            "Org/Name", repository=tmp_path / "models", name=name, delete_download=deletes,
            progress=SilentProgress(),
        )  # fmt: skip
        assert any((tmp_path / "hub").rglob("model.safetensors")) != deletes
    assert hub.sent.count("model.safetensors") == 1


class ShardsProgress(SilentProgress):
    """Notes the shards in the hub's cache when the conversion ends, and interrupts the comparison."""

    def __init__(self, cache: Path, *, interrupts: bool) -> None:
        self._cache, self._interrupts = cache, interrupts
        self.left: list[str] = []

    @contextmanager
    def task(
        self, name: str, *, total: int | None = None, unit: Unit = ""
    ) -> Iterator[Callable[[int], None]]:
        if name.startswith("comparing"):
            # Links, and the files that they point to, which this hub names alike.
            self.left = sorted({path.name for path in self._cache.rglob("*.safetensors")})
            if self._interrupts:
                raise KeyboardInterrupt
        with super().task(name, total=total, unit=unit) as advance:
            yield advance


@pytest.mark.parametrize(
    ("is_tied", "quantizer"),
    [
        pytest.param(True, AWQ, id="tied-awq"),
        pytest.param(False, None, id="untied-floats", marks=pytest.mark.extended),
        pytest.param(True, None, id="tied-floats", marks=pytest.mark.extended),
        pytest.param(False, AWQ, id="untied-awq", marks=pytest.mark.extended),
    ],
)
def test_each_shard_is_deleted_when_it_is_converted(
    hub: Hub, tmp_path: Path, is_tied: bool, quantizer: Quantizer | None
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": is_tied}
    folder = tiny_llama_checkpoint(tmp_path / "tiny", **sizes)
    if quantizer is not None:
        quantized_folder(folder, quantizer)
    shards = sharded(folder)
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    cache = tmp_path / "hub"
    for interrupts in (True, False):  # what was deleted is downloaded again
        progress = ShardsProgress(cache, interrupts=interrupts)
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            export_model(
                "Org/Name", repository=tmp_path / "models", name="m", delete_download=True,
                progress=progress,
            )  # fmt: skip
        # The head is read last, and so is the embedding if it is the head.
        assert progress.left == [shards["model.embed_tokens" if is_tied else "lm_head"]]
    assert not list(cache.rglob("*.safetensors"))
    sent = {shard: hub.sent.count(shard) for shard in shards.values()}
    assert sent == {shard: 1 if shard in progress.left else 2 for shard in sent}


def sharded(folder: Path) -> dict[str, str]:
    """Split the weights of a folder: the embedding, each layer, and the head with the norm before it."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    last = "lm_head" if "lm_head.weight" in tensors else "model.embed_tokens"
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part = ".".join(name.split(".")[:3]) if ".layers." in name else name.rpartition(".")[0]
        parts.setdefault(last if part == "model.norm" else part, {})[name] = tensor
    shards = {part: f"model-{number:05}.safetensors" for number, part in enumerate(parts)}
    for part, held in parts.items():
        save_file(held, folder / shards[part], metadata={"format": "pt"})
    files = {name: shards[part] for part, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return shards


def test_a_folder_is_refused_before_its_weights_are_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("dbrx", "DbrxForCausalLM")))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ExportError, match="DbrxForCausalLM with a mixture of experts"):
        read_checkpoint(tmp_path, source="it")


def test_infinity_is_read_as_transformers_writes_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for path in tiny_checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    config.limits = [0.0, math.inf, -math.inf]
    (tmp_path / "config.json").unlink()
    config.save_pretrained(tmp_path)
    assert '"__float__"' in (tmp_path / "config.json").read_text()
    assert read_checkpoint(tmp_path, source="it").config["limits"] == [0.0, math.inf, -math.inf]
