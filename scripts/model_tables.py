"""Model tables: writes tables of docs/models.md and docs/which_model.md, and the reference of architectures.

    python scripts/model_tables.py           # write
    python scripts/model_tables.py --check   # exit 1 if a page is out of date

They come from the models with short names, the families, the GGUF architectures, the wrappers, and the
reasons of refusals for the default configs of all architectures in transformers. The reference is not stored:
each build of the site reads the code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from genserve.cli.console import sized
from genserve.errors import ExportError
from genserve.export import KNOWN_MODELS
from genserve.export.checkpoints.quantized_checkpoint import METHODS
from genserve.export.families import FAMILIES
from genserve.export.families.exportable import require_exportable
from genserve.export.families.text_part import WRAPPERS
from genserve.export.gguf.architectures import GGUF_ARCHITECTURES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "models.md"

# The models of an architecture, as people know them.
MODELS = {
    "ApertusForCausalLM": "Apertus",
    "ArceeForCausalLM": "AFM 4.5B of Arcee",
    "BloomForCausalLM": "BLOOM",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "CohereForCausalLM": "Command R, Aya 23",
    "DeepseekV2ForCausalLM": "DeepSeek V2; its GGUF files name `deepseek2`",
    "DeepseekV3ForCausalLM": "DeepSeek V3 and R1",
    "Ernie4_5ForCausalLM": "ERNIE 4.5, dense",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5, with experts",
    "Exaone4ForCausalLM": "EXAONE 4",
    "FalconForCausalLM": "Falcon 7B, 40B, 180B",
    "FalconH1ForCausalLM": "Falcon H1",
    "GPT2LMHeadModel": "GPT-2",
    "GPTNeoXForCausalLM": "GPT-NeoX, Pythia",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 up to 1B",
    "Gemma3nForCausalLM": "Gemma 3n, as a text model",
    "Gemma4ForCausalLM": "Gemma 4 E2B, E4B, 31B and 26B-A4B, as text models",
    "Gemma4UnifiedForCausalLM": "Gemma 4 12B, as a text model",
    "GemmaForCausalLM": "Gemma",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Glm4MoeForCausalLM": "GLM 4.5 to 4.7",
    "Glm4MoeLiteForCausalLM": "GLM 4.7 Flash; its GGUF files name `deepseek2`",
    "GlmForCausalLM": "GLM-4, GLM-Edge",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "Granite 3",
    "GraniteMoeForCausalLM": "Granite 3, with experts",
    "GraniteMoeHybridForCausalLM": "Granite 4, with and without recurrent states and experts",
    "GraniteMoeSharedForCausalLM": "Granite 3, with a shared expert",
    "HeliumForCausalLM": "Helium",
    "HunYuanDenseV1ForCausalLM": "Hunyuan, dense",
    "Lfm2ForCausalLM": "LFM2",
    "Lfm2MoeForCausalLM": "LFM2, with experts",
    "Llama4ForCausalLM": "Llama 4, as a text model; sequences of up to 262,144 tokens",
    "LlamaForCausalLM": "Llama 1 to 3, SmolLM 1 and 2, and many others",
    "MiniMaxM2ForCausalLM": "MiniMax M2",
    "Ministral3ForCausalLM": "Ministral 3, as a text model",
    "MinistralForCausalLM": "Ministral 8B",
    "MistralForCausalLM": "Mistral",
    "MixtralForCausalLM": "Mixtral; its GGUF files name `llama`",
    "NemotronForCausalLM": "Nemotron 4, Minitron",
    "NemotronHForCausalLM": "Nemotron H, Nemotron Nano 2 and 3",
    "OPTForCausalLM": "OPT",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoForCausalLM": "OLMo",
    "OlmoHybridForCausalLM": "OLMo Hybrid",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4",
    "PhiForCausalLM": "Phi-1, Phi-1.5, Phi-2",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "Qwen2ForCausalLM": "Qwen 1.5 to 2.5",
    "Qwen2MoeForCausalLM": "Qwen 1.5 and 2, with experts",
    "Qwen3ForCausalLM": "Qwen 3",
    "Qwen3MoeForCausalLM": "Qwen 3, with experts",
    "Qwen3NextForCausalLM": "Qwen 3 Next; its GGUF files name `qwen3next`",
    "Qwen3_5ForCausalLM": "Qwen 3.5 and 3.6, as text models",
    "Qwen3_5MoeForCausalLM": "Qwen 3.5 and 3.6 with experts, as text models",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM 3",
    "StableLmForCausalLM": "StableLM",
    "Starcoder2ForCausalLM": "StarCoder2",
}
# The methods that quantize checkpoints in safetensors: what is read, and what an export with the precision
# "source" has of it.
QUANTIZED = {
    "auto-round": ("2, 4 and 8 bits, in the layout of GPTQ or AWQ", "as `gptq` and `awq`"),
    "awq": ("4 bits", "without loss"),
    "bitsandbytes": ("int8, nf4, fp4", "int8: the codes, with scales in fp16; others are rounded again"),
    "compressed-tensors": (
        "integers of 2, 4 and 8 bits; FP8; MXFP4, NVFP4",
        "integers (with 8 bits: without zero points) and MXFP4: without loss; others are rounded again",
    ),
    "fbgemm_fp8": ("FP8", "rounded again"),
    "fp8": ("FP8, per tensor, output or block", "rounded again"),
    "gptq": ("2, 4 and 8 bits, with or without `desc_act`", "without loss (8 bits: if symmetric)"),
    "mxfp4": ("the experts of gpt-oss", "without loss"),
}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    changed = 0
    for page in (PAGE, DOCS / "which_model.md"):
        text = page.read_text(encoding="utf-8")
        made = derived(text)
        if made != text:
            changed += 1
            print(f"{'out of date' if check else 'written'}: {page.name}")
            if not check:
                page.write_text(made, encoding="utf-8")
    return int(check and changed > 0)


def derived(text: str) -> str:
    """Return the page with its tables written anew."""
    made = (available, refused)
    tables = {table.__name__: table for table in made}
    return _TABLE.sub(lambda found: "\n".join([found[1] + tables[found[2]](), found[3]]), text)


def available() -> str:
    """Return the table of the models with short names."""
    rows = [
        (
            f"`{model.name}`",
            model.good_for,
            sized(model.download_bytes),
            sized(model.graph_bytes),
            sized(model.memory_bytes),
            f"{model.shape.context // 1024}k",
            model.licence + (", account" if model.is_gated else ""),
            model.source,
        )
        for model in KNOWN_MODELS.values()
    ]
    headings = "| name | good for | download | disk | memory | context | licence | source |"
    rule = "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |"
    return "\n".join([headings, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def reference() -> str:
    """Return the page of the architectures and the quantized weights that are read."""
    text = [
        "# Architectures",
        "`genserve export` builds the graphs of these architectures; [models](../models.md#what-runs) says "
        "what becomes of others. The last column has the name in GGUF files, if such files are read.",
        built(),
        "## Text models of others",
        "Of these checkpoints, which also have an encoder of images or sound, the text model is exported:",
        wrappers(),
        "## Quantized weights",
        "What is read from safetensors, and what an export with `--precision source` has of it "
        "([models](../models.md#quantized-checkpoints)).",
        quantized(),
    ]
    return "\n\n".join(text) + "\n"


def built() -> str:
    """Return the table of the architectures that are built."""
    gguf = defaultdict(list)
    for name, translation in GGUF_ARCHITECTURES.items():
        gguf[translation.architecture].append(f"`{name}`")
    rows = [
        f"| `{name}` | {MODELS[name]} | {', '.join(gguf[name]) or '-'} |"
        for name in sorted(FAMILIES, key=str.lower)
    ]
    return "\n".join(["| architecture | models | GGUF |", "| --- | --- | --- |", *rows])


def quantized() -> str:
    """Return the table of the formats of quantized weights that are read."""
    rows = [
        f"| `{method}` | {QUANTIZED[method][0]} | "
        f"{', '.join(f'`{value}`' for value in values if value) or '-'} | {QUANTIZED[method][1]} |"
        for method, (_, values) in METHODS.items()
    ]
    headings = "| `quant_method` | weights | layouts | in a graph |"
    return "\n".join([headings, "| --- | --- | --- | --- |", *rows])


def wrappers() -> str:
    """Return the list of the architectures whose text model is built."""
    return ", ".join(f"`{name}`" for name in sorted(WRAPPERS))


def refused() -> str:
    """Return the table of the architectures that are refused."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = defaultdict(set)
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config = _default_config(AutoConfig, kind, name)
        if config is None or name in FAMILIES:
            continue
        try:
            require_exportable(config, source="it")
        except ExportError as error:
            reason = re.sub(r"^.* with |, which (is|are) not .*$", "", error.message)
            names[reason].add(name)
    rows = [
        f"| {reason} | {', '.join(map(_short, sorted(found)))} |" for reason, found in sorted(names.items())
    ]
    return "\n".join(["| reason | architectures |", "| --- | --- |", *rows])


def _default_config(auto: Any, kind: str, name: str) -> dict[str, Any] | None:
    """Return the config of the first model of a type; None if transformers has no valid one."""
    try:
        config: dict[str, Any] = auto.for_model(kind, architectures=[name]).to_dict()
    except Exception:   # transformers raises any class
        return None
    if kind == "lfm2":      # by default it has none of the layers for which it was made
        config["layer_types"][0] = "conv"
    return config


def _short(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


if __name__ == "__main__":
    sys.exit(main())
