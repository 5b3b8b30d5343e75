"""The commands `genserve export` and `genserve pull`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from genserve.cli.completion_command import available_names
from genserve.cli.flags import RepositoryFlags
from genserve.errors import ExportError
from genserve.settings import Flag, flag
from genserve.store import default_repository, described, display_path, repository_flag

if TYPE_CHECKING:
    from genserve.export import EncoderReport, ExportReport


@dataclass(frozen=True, kw_only=True)
class _GraphFlags(RepositoryFlags):
    """The flags of both commands, about the graph to write."""

    precision: Literal["int8", "int4", "fp16", "fp32", "source"] | None = flag(
        None,
        Flag(
            help="Precision of the weights; source: the formats of a quantized checkpoint, as they are. "
            "Default: usually int8; source for AWQ, GPTQ and others in 4 bits; fp32 for TorchScript.",
            variable="GENSERVE_PRECISION",
        ),
    )
    kv_cache: Literal["float", "int8"] = flag(
        "float",
        Flag(help="Keys and values in fp16 (fp32 in an fp32 export), or in int8 with half of the memory."),
    )
    pipeline_stages: int = flag(
        1,
        Flag(
            help="Cut the layers into N graphs, for a model that is larger than one device; `instance_group` "
            "in config.pbtxt names the devices.",
            minimum=1,
            metavar="N",
        ),
    )
    max_sequence_length: int | None = flag(
        None,
        Flag(
            help="Limit a sequence to N tokens, in config.pbtxt. Default: the model's own context.",
            minimum=2,
            metavar="N",
        ),
    )
    beside: str | None = flag(
        None,
        Flag(
            help="Add the graph to an existing model, in this subfolder; `genserve tune` chooses a graph.",
            metavar="FOLDER",
        ),
    )
    overwrite: bool = flag(
        False,
        Flag(
            help="Replace the weights and configs, and delete additional graphs; with --beside: replace only "
            "that graph."
        ),
    )
    delete_download: bool = flag(
        False,
        Flag(
            help="Delete the downloaded weights: each shard once it is converted, the rest once the model is "
            "installed."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PullFlags(_GraphFlags):
    """The flags of `genserve pull`."""

    name: str = flag(
        MISSING,
        Flag(
            help="A name of `genserve models --available`, or ORG/NAME or ORG/NAME:Q4_K_M on the Hugging "
            "Face hub.",
            is_argument=True,
            complete=available_names,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ExportFlags(_GraphFlags):
    """The flags of `genserve export`."""

    source: str = flag(
        MISSING,
        Flag(
            help="A Hugging Face folder, a .gguf file, or ORG/NAME or ORG/NAME:Q4_K_M on the hub.",
            is_argument=True,
        ),
    )
    name: str | None = flag(
        None, Flag(help="Name of the model in the repository. Default: that of the source, in lower case.")
    )
    file_format: Literal["onnx", "torchscript"] = flag(
        "onnx",
        Flag(help="Format of the graph; ONNX is faster, TorchScript runs in torch.", names=("--format",)),
    )
    pooling: Literal["mean", "cls", "last"] | None = flag(
        None,
        Flag(
            help="Make vectors of texts: of the last hidden states of all tokens, the first or the last one. "
            "Default, for encoders only: what the checkpoint says.",
        ),
    )
    adapter: tuple[Path, ...] = flag(
        (),
        Flag(
            help="Merge a LoRA or DoRA adapter: a folder of PEFT, or a .gguf file of llama.cpp; repeatable, "
            "merged in this order.",
            metavar="FOLDER_OR_GGUF",
        ),
    )
    base: str | None = flag(
        None,
        Flag(
            help="The source is an adapter, as of --adapter: it becomes a model that the engine of this one "
            "runs.",
            metavar="MODEL",
        ),
    )
    allow_pickled_weights: bool = flag(
        False,
        Flag(help="Read PyTorch's .bin files too: only tensors, but such files have run code in the past."),
    )


def export(flags: ExportFlags) -> None:
    """Convert a checkpoint to a model of the repository, and compare it with its source."""
    from genserve.cli.console import ConsoleProgress
    from genserve.export import export_model, is_adapter, is_encoder

    repository = flags.model_repository or default_repository()
    if flags.base is not None:
        _export_adapter(flags, repository, base=flags.base)
        return
    if is_adapter(flags.source):
        raise ExportError(
            f"{flags.source} is an adapter",
            remedy="--base MODEL serves it beside that model of the repository; to merge it, export its base "
            f"with --adapter {flags.source}",
        )
    if flags.pooling or is_encoder(flags.source):
        _export_encoder(flags, repository)
        return
    report = export_model(
        flags.source,
        repository=repository,
        name=flags.name or _default_name(flags.source),
        file_format=flags.file_format,
        precision=flags.precision,
        kv_cache=flags.kv_cache,
        pipeline_stages=flags.pipeline_stages,
        max_sequence_length=flags.max_sequence_length,
        beside=flags.beside,
        overwrite=flags.overwrite,
        allow_pickled_weights=flags.allow_pickled_weights,
        delete_download=flags.delete_download,
        adapters=flags.adapter,
        progress=ConsoleProgress(),
    )
    print_report(report, beside=flags.beside)


def _default_name(source: str) -> str:
    """Return the name of a model that is exported without one: that of its folder or file, or of the hub."""
    from genserve.export import pulled_name

    path = Path(source).expanduser()
    name = None if path.exists() else pulled_name(source)
    return name or path.resolve().name.removesuffix(".gguf").lower()


def _export_adapter(flags: ExportFlags, repository: Path, *, base: str) -> None:
    from genserve.export.adapters.adapter_model import export_adapter

    folder = Path(flags.source).expanduser().resolve()
    if _given(flags) - {"model_repository", "source", "name", "base", "overwrite"}:
        raise ExportError(
            f"{folder.name} is an adapter of {base}, and a flag is for models",
            remedy="give only --name, --overwrite, and where the adapter goes",
        )
    name = flags.name or folder.name.removesuffix(".gguf").lower()
    path = export_adapter(folder, repository=repository, name=name, base=base, overwrite=flags.overwrite)
    print(f"{name}: an adapter of {base}: {display_path(path)}")
    print(f"next: genserve serve{repository_flag(repository)}")


def _export_encoder(flags: ExportFlags, repository: Path) -> None:
    from genserve.backends.libraries import require_export_packages
    from genserve.cli.console import ConsoleProgress

    folder = Path(flags.source).expanduser().resolve()
    _require_flags_of_encoders(flags, folder.name)
    require_export_packages(f"exporting {folder.name}")
    from genserve.export.encoders.encoder import export_encoder

    report = export_encoder(
        folder,
        repository=repository,
        name=flags.name or folder.name.lower(),
        precision=flags.precision,
        pooling=flags.pooling,
        max_sequence_length=flags.max_sequence_length,
        overwrite=flags.overwrite,
        progress=ConsoleProgress(),
    )
    _print_encoder_report(report)


def _require_flags_of_encoders(flags: _GraphFlags, name: str) -> None:
    of_text_models = {
        "kv_cache", "pipeline_stages", "beside", "file_format", "adapter", "base", "allow_pickled_weights",
    }  # fmt: skip
    if _given(flags) & of_text_models:
        raise ExportError(
            f"{name} is exported as an encoder, and a flag is for models that generate text",
            remedy="give only --precision, --pooling, --max-sequence-length, --overwrite, and where it goes",
        )


def _given(flags: _GraphFlags) -> set[str]:
    """Return the names of the flags that do not have their defaults."""
    return {one.name for one in fields(flags) if getattr(flags, one.name) != one.default}


def _print_encoder_report(report: EncoderReport) -> None:
    print(
        f"{report.name}: {report.precision}, {report.size_bytes / 1e6:.1f} MB, exported in "
        f"{report.seconds:.0f} s: {display_path(report.path)}\n"
        f"parity with the source: largest difference {report.largest_difference:.3g}, lowest cosine "
        f"{report.lowest_cosine:.6f}, correlation {report.correlation:.6f}\n"
        f"next: genserve serve{repository_flag(report.path.parent)}"
    )


def print_report(report: ExportReport, *, beside: str | None) -> None:
    """Print the result of an export, its parity with the source, and the next commands."""
    where = repository_flag(report.path.parent)
    cache = ", KV cache in int8" if report.kv_cache == "int8" else ""
    print(
        f"{report.name}: {report.precision}{cache}, {report.size_bytes / 1e6:.1f} MB, "
        f"exported in {report.seconds:.0f} s: {display_path(report.path)}"
    )
    print(
        f"parity with the source: largest logit difference {report.largest_logit_difference:.3g}, "
        f"top-1 agreement {report.top1_agreement:.1%}, perplexity x{report.perplexity_ratio:.3f}, "
        f"KL {report.divergence:.4f}"
    )
    if report.precision == "source":
        rounded = f", {report.num_rounded} rounded" if report.num_rounded else ""
        print(f"weights: {report.num_kept} as in the source, without loss{rounded}")
    if beside is None:
        print(f"next: genserve chat {report.name}{where}\n      genserve serve{where}")
    else:
        print(f"next: genserve tune {report.name}{where}, which chooses one of the graphs of the model")


def pull(flags: PullFlags) -> None:
    """Download a model and export it to the repository, unless it is already there."""
    from genserve.cli.console import ConsoleProgress
    from genserve.export import EncoderReport, known_encoder, pull_encoder
    from genserve.export import pull as pull_model

    repository = flags.model_repository or default_repository()
    report: EncoderReport | ExportReport | None
    if encoder := known_encoder(flags.name):
        _require_flags_of_encoders(flags, encoder.name)
        report = pull_encoder(
            encoder,
            repository=repository,
            precision=flags.precision,
            max_sequence_length=flags.max_sequence_length,
            overwrite=flags.overwrite,
            delete_download=flags.delete_download,
            progress=ConsoleProgress(),
        )
    else:
        report = pull_model(
            flags.name,
            repository=repository,
            precision=flags.precision,
            kv_cache=flags.kv_cache,
            pipeline_stages=flags.pipeline_stages,
            max_sequence_length=flags.max_sequence_length,
            beside=flags.beside,
            overwrite=flags.overwrite,
            delete_download=flags.delete_download,
            progress=ConsoleProgress(),
        )
    if report is None:
        target = f" in {flags.precision}" if flags.precision else ""
        print(f"{flags.name} is already in {described(repository)}; --overwrite exports it again{target}")
    elif isinstance(report, EncoderReport):
        _print_encoder_report(report)
    else:
        print_report(report, beside=flags.beside)
