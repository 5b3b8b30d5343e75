"""Vocabularies: minimal tokenizers of the families that language models use."""

from __future__ import annotations

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from genserve.text.tokenizer import Tokenizer
from genserve.text.tokenizer_files import TokenizerFiles
from tests.support.tiny_llama import tiny_tokenizer

__all__ = [
    "FAMILIES",
    "TEXTS",
    "bloom",
    "byte_level_bpe",
    "sentencepiece_bpe",
    "tokenizer_of",
    "unigram",
    "word_piece",
]

TEXTS = [
    "The quick brown fox doesn't jump, does it? Yes: 12 times.",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u0939\u093f\u0928\u094d\u0926\u0940 \u0964",
    "cafe\u0301 na\u0308ive \u00e9t\u00e9 \N{GRINNING FACE}\N{WAVING HAND SIGN}\U0001f3fd family",
]
CONTROL = ["<unk>", "<s>", "</s>"]
WORDS = ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581ab", "\u00e9", "\N{REPLACEMENT CHARACTER}"]


def sentencepiece_bpe() -> Backend:
    """As in Llama 2 and Mistral: spaces as U+2581, unknown characters as byte tokens."""
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
    """As in T5's descendants: the control tokens are also words of the model."""
    words = [*CONTROL, *WORDS, "<", ">", "/", "s"]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(CONTROL)
    return backend


def byte_level_bpe() -> Backend:
    """As in GPT-2, Llama 3, Qwen and SmolLM."""
    return tiny_tokenizer(vocab_size=320)


def word_piece() -> Backend:
    """As in BERT: pieces within a word begin with ##, and the decoder puts a space before all others."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=160, special_tokens=CONTROL))
    return backend


def bloom() -> Backend:
    """As in BLOOM: bytes, after a special splitter."""
    backend = Backend(models.BPE())
    no_word = "(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])"
    splitter = pre_tokenizers.Split(Regex(f" ?[^{no_word}]+"), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([splitter, bytes_of])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


FAMILIES = [byte_level_bpe, sentencepiece_bpe, unigram, word_piece, bloom]


def tokenizer_of(backend: Backend) -> Tokenizer:
    """A tokenizer without any template or bos token."""
    files = TokenizerFiles(
        backend=backend, special_tokens={}, add_bos_token=False, eos_token_ids=frozenset(), chat_template=None
    )
    return Tokenizer(files)
