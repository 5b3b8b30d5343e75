"""Vocabularies: the families of tokenizers that language models use, as small as they can be."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from genserve.text.tokenizer import Tokenizer
from genserve.text.tokenizer_files import TokenizerFiles
from tests.checkpoints import tiny_tokenizer

__all__ = ["FAMILIES", "byte_level_bpe", "sentencepiece_bpe", "tokenizer_of", "unigram"]

CONTROL = ["<unk>", "<s>", "</s>"]
WORDS = ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581ab", "\u00e9", "\N{REPLACEMENT CHARACTER}"]


def sentencepiece_bpe() -> Backend:
    """As Llama 2 and Mistral have it: spaces as U+2581, unknown characters as byte tokens."""
    words = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = Backend(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("\u2581", "a"), ("\u2581", "b"), ("\u2581a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(CONTROL)
    return backend


def unigram() -> Backend:
    """As T5's descendants have it: the control tokens are words of the model too."""
    words = [*CONTROL, *WORDS, "<", ">", "/", "s"]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(CONTROL)
    return backend


def byte_level_bpe() -> Backend:
    """As GPT-2, Llama 3, Qwen and SmolLM have it."""
    return tiny_tokenizer(vocab_size=320)


FAMILIES = [byte_level_bpe, sentencepiece_bpe, unigram]


def tokenizer_of(backend: Backend) -> Tokenizer:
    """A tokenizer without any template or bos token."""
    files = TokenizerFiles(
        backend=backend,
        special_tokens={},
        add_bos_token=False,
        eos_token_ids=frozenset(),
        chat_template=None,
    )
    return Tokenizer(files)
