"""Tokenizers built from GGUF metadata, compared with known ones.

`data/llama_cpp_vectors.json.gz` has llama.cpp's test vectors: its texts, the ids that the models' own
tokenizers give them (`models/ggml-vocab-*.gguf.inp` and `.out` of its repository), and of each vocabulary the
tokens and merges that could occur in these texts, numbered anew in the same order.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from genserve.errors import ExportError
from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.gguf.gguf_tokenizer import tokenizer_files
from genserve.export.known_models import SMOLLM2_FILE
from genserve.export.pulling import cache_folder
from tests.export.ggufs import write_gguf
from tests.support.tiny_llama import SPECIAL_TOKENS, tiny_llama_checkpoint

TEXTS = [
    "the rain in Spain stays mainly in the plain",
    "  two  spaces,\ttabs\n\n\nand lines \r\n",
    "héllo wörld, 海は静かです 👩‍🚀",
    "I'll say it's theirs; they've said SO!",
    "<|im_start|>user\nhello<|im_end|>\n",
]


VOCABULARIES = (
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe",
    "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip


@cache
def vectors() -> dict[str, Any]:
    data = gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_vectors.json.gz").read_bytes())
    found: dict[str, Any] = json.loads(data)
    return found


def tokenizer_of(architecture: str = "llama", **ggml: Any) -> Tokenizer:
    metadata = {"general.architecture": architecture}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    return Tokenizer.from_str(tokenizer_files(metadata, source="tiny")["tokenizer.json"].decode())


def test_the_vectors_are_those_of_all_vocabularies() -> None:
    assert tuple(vectors()["vocabularies"]) == VOCABULARIES


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_ids_of_llama_cpps_vectors(name: str) -> None:
    vocabulary = vectors()["vocabularies"][name]
    tokenizer = tokenizer_of(**vocabulary["tokenizer"])
    texts = vectors()["texts"][vocabulary["texts"]]
    assert len(texts) > 40
    for text, ids in zip(texts, vocabulary["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.parametrize("name", ["gemma-4", "llama-bpe", "llama-spm", "phi-3", "qwen2"])
def test_a_text_is_decoded_as_it_was(name: str) -> None:
    vocabulary = vectors()["vocabularies"][name]
    tokenizer = tokenizer_of(**vocabulary["tokenizer"])
    for text, ids in zip(vectors()["texts"][vocabulary["texts"]], vocabulary["ids"], strict=True):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_what_is_added_around_a_text_is_by_default_that_of_the_kind() -> None:
    spm = vectors()["vocabularies"]["llama-spm"]["tokenizer"]
    tokens = ["<s>", "\u2581the"]
    assert tokenizer_of(**spm).encode("the").tokens == tokens
    assert tokenizer_of(**spm | {"add_bos_token": False}).encode("the").tokens == tokens[1:]
    assert tokenizer_of(**spm | {"add_eos_token": True}).encode("the").tokens == [*tokens, "</s>"]
    bert = vectors()["vocabularies"]["bert-bge"]["tokenizer"]
    assert tokenizer_of(**bert).encode("the").tokens == ["[CLS]", "the", "[SEP]"]


def test_spaces_after_the_special_tokens_of_phi_3_belong_to_them() -> None:
    phi3 = dict(vectors()["vocabularies"]["phi-3"]["tokenizer"])
    phi3 |= {"tokens": [*phi3["tokens"], "<|user|>"], "token_type": [*phi3["token_type"], 3]}
    phi3 |= {"scores": [*phi3["scores"], 0.0], "add_bos_token": False}
    user = phi3["tokens"].index("<|user|>")
    assert tokenizer_of("phi3", **phi3).encode("<|user|>\n\n").ids == [user]
    assert len(tokenizer_of("llama", **phi3).encode("<|user|>\n\n").ids) > 1


def test_a_unigram_tokenizer_is_that_of_sentencepiece() -> None:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace("  ", " ")]
    )
    options = {"vocab_size": 90, "special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    trained.train_from_iterator(TEXTS * 9, trainers.UnigramTrainer(**options, show_progress=False))
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    found = tokenizer_of(
        "t5",
        model="t5",
        tokens=[piece for piece, _ in pieces],
        scores=[score for _, score in pieces],
        token_type=[3, 3, 2] + [1] * (len(pieces) - 3),
        unknown_token_id=2,
        eos_token_id=1,
        remove_extra_whitespaces=True,
    )
    for text in TEXTS[:1] + TEXTS[3:]:
        assert found.encode(text, add_special_tokens=False).ids == trained.encode(text).ids
        assert found.encode(text).tokens[-1] == "</s>"


@pytest.mark.parametrize("model", ["rwkv", "plamo2", "no-vocab", None])
def test_an_unknown_kind_is_rejected_by_name(model: str | None) -> None:
    with pytest.raises(ExportError, match=f"kind '{model}'"):
        tokenizer_of(**({} if model is None else {"model": model}), tokens=["a"])


@pytest.mark.parametrize(
    ("extra", "ends"),
    [({}, [4]), ({"eot_token_id": 2}, [0, 2]), ({"tokens": ["a", "b", "c", "d", "e"]}, [0])],
    ids=["by its text", "by its key", "only eos"],
)
def test_the_end_of_a_turn_ends_an_answer(extra: dict[str, Any], ends: list[int]) -> None:
    ggml = {"model": "gpt2", "tokens": ["a", "b", "c", "d", "<|eot_id|>"], "token_type": [1, 1, 1, 1, 3]}
    ggml |= {"merges": [], "eos_token_id": 0} | extra
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    found = json.loads(tokenizer_files(metadata, source="tiny")["generation_config.json"])["eos_token_id"]
    assert found == sorted({0, *ends})


def test_the_default_of_several_chat_templates_is_taken() -> None:
    ggml = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    found = tokenizer_files({**ggml, **named, "tokenizer.chat_template": "plain"}, source="tiny")
    assert found["chat_template.jinja"] == b"plain"
    assert tokenizer_files({**ggml, **named}, source="tiny")["chat_template.jinja"] == b"tools"
    assert "chat_template.jinja" not in tokenizer_files(ggml, source="tiny")


def tiny_tokenizer(folder: Path, *, pre: str) -> Tokenizer:
    source = write_gguf(tiny_llama_checkpoint(folder / "tiny"), folder / "tiny.gguf", pre=pre)
    files = read_checkpoint(source, source="tiny").tokenizer_files
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize("text", TEXTS)
def test_a_gpt2_tokenizer_equals_that_of_the_folder(tmp_path: Path, text: str) -> None:
    found = tiny_tokenizer(tmp_path, pre="gpt-2")
    expected = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert found.encode(text).ids == expected.encode(text).ids
    assert found.decode(found.encode(text).ids) == expected.decode(expected.encode(text).ids)


def test_smollm_splits_numbers_into_digits(tmp_path: Path) -> None:
    words = tiny_tokenizer(tmp_path, pre="smollm").pre_tokenizer.pre_tokenize_str("in 1897 ab12")
    assert [word for word, _ in words] == ["in", "Ġ", "1", "8", "9", "7", "Ġab", "1", "2"]


def test_llama_3_splits_numbers_into_threes_and_adds_the_bos_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, pre="llama-bpe")
    words = tokenizer.pre_tokenizer.pre_tokenize_str("in 1897's ab")
    assert [word for word, _ in words] == ["in", "Ġ", "189", "7", "'s", "Ġab"]
    assert tokenizer.encode("a").ids[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False).ids[0] != 1


@pytest.mark.parametrize("text", [*TEXTS, "in 1897 ab12", "e\u0301te\u0301"])
def test_a_qwen2_tokenizer_is_the_one_of_transformers(tmp_path: Path, text: str) -> None:
    found = tiny_tokenizer(tmp_path, pre="qwen2")
    model = json.loads(found.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    expected = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, eos_token="<|im_end|>")
    expected.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    assert found.encode(text).ids == expected(text).input_ids


def test_bloom_splits_words_at_punctuation(tmp_path: Path) -> None:
    words = tiny_tokenizer(tmp_path, pre="bloom").pre_tokenizer.pre_tokenize_str("in 1897, (well) it's. So")
    assert [word for word, _ in words] == ["in", "Ġ1897", ",Ġ(", "well", ")", "Ġit's", ".", "ĠSo"]


@pytest.mark.slow
def test_the_default_model_has_the_tokenizer_that_transformers_builds() -> None:
    path = cache_folder() / SMOLLM2_FILE.name
    if not path.exists():
        pytest.skip("the default model is not in the cache: `genserve pull smollm2` brings it")
    from transformers import AutoTokenizer

    files = read_checkpoint(path, source="tiny").tokenizer_files
    found = Tokenizer.from_str(files["tokenizer.json"].decode())
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=SMOLLM2_FILE.name)
    for text in TEXTS:  # without digits, which transformers does not split for GGUF files
        assert found.encode(text).ids == expected(text, add_special_tokens=False).input_ids
