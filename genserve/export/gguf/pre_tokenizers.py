r"""GGUF pre-tokenizers: the expressions that split a text into words, by `tokenizer.ggml.pre`.

The names are llama.cpp's (`llama-vocab.cpp`); the expressions are those in the models' own tokenizer.json.
Each expression splits the pieces that the one before it has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DIGITS = r"\p{N}{1,3}"
# The letters of DeepSeek LLM: those with an upper and a lower case in an older Unicode.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _gpt4(digits: str, *, letters: str = r"\p{L}+", others: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    return rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{others}" + _SPACES


def _by_case(digits: str, *, ending: str = "") -> str:
    """Return the expression of o200k, which splits before a capital letter that follows a small one."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES


def _deepseek_v3(ending: str = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+") -> str:
    marks = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
    return marks + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+" + ending


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level BPE splits a text.

    Attributes:
        expressions: their matches, and what is between them, are the words.
        ignore_merges: a word that is a token becomes this token, even if no sequence of merges leads to it.
        add_bos: whether a text begins with the BOS token, if the file does not say so.
        composes: the text is normalized first, by Unicode's form C, which llama.cpp leaves out.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    composes: bool = False


_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001
_SETS: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais exaone4 granite-docling mellum modern-bert jina-es jina-de jina-v2-es "
        "jina-v2-de jina-v1-en jina-v2-code roberta-bpe trillion gigachat a.x-4.0",
    ),
    (PreTokenizer((_gpt4(_DIGITS),), ignore_merges=True, add_bos=True),
     "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (PreTokenizer((_gpt4(_DIGITS),), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((_gpt4(_DIGITS),)), "chatglm-bpe dbrx smaug-bpe"),
    (PreTokenizer((_gpt4(r"\p{N}"),), composes=True), "qwen2"),
    (PreTokenizer((_gpt4(r"\p{N}"),)),
     "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan grok-2 solar-open"),
    (PreTokenizer((_gpt4(r"\p{N}", letters=r"[\p{L}\p{M}]+", others=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
     "qwen35"),
    (PreTokenizer((r"\p{N}", _GPT2)),
     "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((_by_case(_DIGITS, ending=f"{_SHORT_FORMS}?"),)),
     "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _by_case(_DIGITS, ending=f"{_SHORT_FORMS}?"))),
     "tiny_aya cohere2moe"),
    (PreTokenizer((_by_case(r"\p{N}"),), ignore_merges=True, add_bos=True), "tekken"),
    (
        PreTokenizer(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
                _by_case(r"\p{N}", ending=f"{_SHORT_FORMS}?"),
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (PreTokenizer((_DIGITS, _CJK, _deepseek_v3())), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer((_DIGITS, _CJK, _deepseek_v3(r"|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}")), "spark2_5"),
    (
        PreTokenizer(
            (
                r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",  # noqa: RUF001
                r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")), "deepseek-coder"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (PreTokenizer((r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
                   r"\s*[\r\n]|\s+(?!\S)|\s+",)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_gpt4(r"\p{N}", letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                         others=r"[^\s\p{L}\p{N}]+[\r\n/]?").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)),
     "exaone-moe"),
    (PreTokenizer((_gpt4(r"\p{N}", others=r"[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (PreTokenizer((r"[^\n]+|[\n]+", _gpt4(r"\p{N}"))), "laguna"),
    (PreTokenizer((_DIGITS, _gpt4(r"\p{N}+")), ignore_merges=True), "minicpm5"),
    (PreTokenizer((_gpt4(r"\p{N}").removeprefix(f"{_SHORT_FORMS}|"),)), "ufakzeka"),
    (PreTokenizer((_gpt4(_DIGITS).removesuffix(_SPACES) + r"|\s*[\r\n]+|"
                   + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}",)),
     "jais-2"),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
    (
        PreTokenizer(
            (
                "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: pre for pre, names in _SETS for name in names.split()}
)
