"""Tokenizers built from GGUF metadata, compared with known ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from genserve.export.checkpoint_reader import read_checkpoint
from genserve.export.pulling import FILE, cache_folder
from tests.export.ggufs import write_gguf
from tests.support.tiny_llama import SPECIAL_TOKENS, tiny_llama_checkpoint

TEXTS = [
    "the rain in Spain stays mainly in the plain",
    "  two  spaces,\ttabs\n\n\nand lines \r\n",
    "héllo wörld, 海は静かです 👩‍🚀",
    "I'll say it's theirs; they've said SO!",
    "<|im_start|>user\nhello<|im_end|>\n",
]


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
    path = cache_folder() / FILE
    if not path.exists():
        pytest.skip("the default model is not in the cache: `genserve pull smollm2` brings it")
    from transformers import AutoTokenizer

    files = read_checkpoint(path, source="tiny").tokenizer_files
    found = Tokenizer.from_str(files["tokenizer.json"].decode())
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=FILE)
    for text in TEXTS:  # without digits, which transformers does not split for GGUF files
        assert found.encode(text).ids == expected(text, add_special_tokens=False).input_ids
