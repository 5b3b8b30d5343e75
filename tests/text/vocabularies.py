"""Vocabularies: minimal tokenizers of the families that language models use."""

from __future__ import annotations

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from genserve.text.tokenizer import Tokenizer
from genserve.text.tokenizer_files import TokenizerFiles
from tests.support.tiny_llama import tiny_tokenizer

__all__ = [
    "FAMILIES",
    "KINDS",
    "TEXTS",
    "bloom",
    "byte_level_bpe",
    "metaspace_bpe",
    "sentencepiece_bpe",
    "tokenizer_of",
    "unigram",
    "unigram_with_bytes",
    "unprefixed_bpe",
    "word_end_bpe",
    "word_piece",
]

TEXTS = [
    "The quick brown fox doesn't jump, does it? Yes: 12 times.",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u0939\u093f\u0928\u094d\u0926\u0940 \u0964",
    "cafe\u0301 na\u0308ive \u00e9t\u00e9 \N{GRINNING FACE}\N{WAVING HAND SIGN}\U0001f3fd family",
]
CONTROL = ["<unk>", "<s>", "</s>"]
WORDS = [
    "\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581ab", "\u00e9", "\N{REPLACEMENT CHARACTER}",
    "\u4e16", "\u2581\u4e16", "\u0430", "\u2581\u0430", "\u0928", "\u2581\u0928",
]


def _byte_fallback_bpe() -> Backend:
    words = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = Backend(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("\u2581", word[1:]) for word in WORDS if len(word) == 2] + [("\u2581a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.add_special_tokens(CONTROL)
    return backend


def _fallback_decoder(*more: object) -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )


def sentencepiece_bpe() -> Backend:
    """As in Llama 2, Mistral and Phi 3: spaces as U+2581, one before the text; other characters as bytes."""
    backend = _byte_fallback_bpe()
    prepend, replace = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([prepend, replace])
    backend.decoder = _fallback_decoder(decoders.Strip(content=" ", left=1, right=0))
    return backend


def metaspace_bpe() -> Backend:
    """As in Llama 2 without `legacy`: the space before the text comes from the pre-tokenizer."""
    backend = _byte_fallback_bpe()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = _fallback_decoder(decoders.Strip(content=" ", left=1, right=0))
    return backend


def unprefixed_bpe() -> Backend:
    """As in Gemma: spaces as U+2581, none before the text."""
    backend = _byte_fallback_bpe()
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = _fallback_decoder()
    return backend


def unigram() -> Backend:
    """As in T5's descendants: the control tokens are also words of the model."""
    words = [*CONTROL, *WORDS, "<", ">", "/", "s"]
    backend = Backend(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(CONTROL)
    return backend


def unigram_with_bytes() -> Backend:
    """As in SentencePiece's Unigram models with byte fallback."""
    words = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = [(word, -float(i)) for i, word in enumerate(words)]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
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


def word_end_bpe() -> Backend:
    """As in the first GPT: the last piece of a word ends with a mark, which the decoder makes a space."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=CONTROL, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


FAMILIES = [byte_level_bpe, sentencepiece_bpe, unigram, word_piece, bloom]
# With those that differ in the spaces and bytes of their texts only.
KINDS = [*FAMILIES, metaspace_bpe, unprefixed_bpe, unigram_with_bytes, word_end_bpe]


def tokenizer_of(backend: Backend) -> Tokenizer:
    """A tokenizer without any template or bos token."""
    files = TokenizerFiles(
        backend=backend, special_tokens={}, add_bos_token=False, eos_token_ids=frozenset(), chat_template=None
    )
    return Tokenizer(files)
