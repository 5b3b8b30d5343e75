"""Hub: downloads checkpoints of the Hugging Face hub, with its progress bars and cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from genserve.backends.libraries import require_export_packages
from genserve.errors import ExportError
from genserve.export.checkpoint_reader import TOKENIZER_FILES, first_line, read_config
from genserve.export.export_options import HUB_NAME
from genserve.export.families.exportable import require_exportable

_WANTED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *TOKENIZER_FILES)
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_GGUF = re.compile(
    r"(?P<stem>(?:.*?[-._/])?(?P<quantization>(?:UD-)?I?Q\d\w*|TQ\d\w*|MXFP4\w*|B?F16|F32)|.*?)"
    r"(?:-\d{5}-of-\d{5})?\.gguf",
    re.IGNORECASE,
)
_DYNAMIC = "ud-"    # before the names of mixtures by Unsloth, which may be left out
# The quantization of a file that is not named, as llama.cpp chooses it.
_DEFAULTS = ("q4_k_m", "q8_0")


def locate(source: str, *, allow_pickled_weights: bool = False) -> Path:
    """Return the folder or file of a checkpoint: the path `source`, or a download from the hub.

    Weights in .bin files are downloaded only with `allow_pickled_weights`.

    Raises:
        MissingDependency: a package that exports the download is not installed.
        ExportError: `source` is neither a path nor a name on the hub, the download failed, or the config,
            which is downloaded first, shows that the model cannot be exported.
    """
    path = Path(source).expanduser()
    if (path / "config.json").exists() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and HUB_NAME.fullmatch(source):
        return _download(source, allow_pickled_weights=allow_pickled_weights)
    missing = "config.json in the folder" if path.is_dir() else "" if path.exists() else "such file or folder"
    raise ExportError(
        f"{source!r} is not a checkpoint" + (f": there is no {missing}" if missing else ""),
        remedy="give a folder with config.json and *.safetensors, a .gguf file, or ORG/NAME or "
        "ORG/NAME:Q4_K_M on the hub",
    )


def _download(source: str, *, allow_pickled_weights: bool) -> Path:
    """Download what an export reads of a model, and return its folder or its GGUF file.

    Args:
        source: matches `HUB_NAME`: ORG/NAME, or ORG/NAME:Q4_K_M for one of several GGUF files. Of a model
            with GGUF files alone it is that of Q4_K_M, else of Q8_0.
        allow_pickled_weights: download weights in .bin files if there are no others.

    Raises:
        MissingDependency: a package that exports the download is not installed.
        ExportError: the download failed; there is no such file; or the config, which is downloaded first,
            shows that the model cannot be exported.
    """
    require_export_packages(f"exporting {source}")
    from huggingface_hub import snapshot_download

    match = HUB_NAME.fullmatch(source)
    assert match is not None
    name, quantization = match["name"], match["quantization"]
    with _failures(name):
        if quantization is None:
            # Asks the hub for no list, so that it works without a network once the model is in the cache.
            folder = Path(snapshot_download(name, allow_patterns="config.json"))
            if (folder / "config.json").exists():
                require_exportable(read_config(folder), source=name)
            # One after the other: of a download that breaks, the next one finds all but one file complete.
            folder = Path(snapshot_download(name, allow_patterns=_WANTED, max_workers=1))
            if any(folder.glob("*.safetensors")):
                return folder
            if allow_pickled_weights:
                snapshot_download(name, allow_patterns=_PICKLED, max_workers=1)
                return folder
        files = _gguf_files(name)
        if quantization is None and not files:
            return folder       # whose reader tells what is missing
        chosen = _choose(files, quantization, name=name)
        return Path(snapshot_download(name, allow_patterns=chosen, max_workers=1)) / chosen[0]


def forget_download(path: Path) -> None:
    """Delete the folder or file that `locate` has downloaded, with the files in the hub's cache."""
    from huggingface_hub import scan_cache_dir

    # The folder is models--ORG--NAME/snapshots/REVISION.
    folder = next(folder for folder in (path, *path.parents) if folder.parent.name == "snapshots")
    scan_cache_dir(folder.parents[2]).delete_revisions(folder.name).execute()


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Raise failed downloads as ExportError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ExportError(
            f"{name} could not be downloaded from the Hugging Face hub: {first_line(error)}",
            remedy="check the name, the network, and HF_TOKEN for a gated model; or export a local folder",
        ) from error


def _choose(files: Iterable[_GgufFile], wanted: str | None, *, name: str) -> list[str]:
    """Return the GGUF file with a quantization, in its parts, the first one first."""
    files = sorted(files, key=lambda file: (len(file.path), file.path))     # the plainest name first
    by_quantization = {file.quantization: file.stem for file in reversed(files)}
    wanted_ones = _DEFAULTS if wanted is None else (wanted.lower(),)
    named = [name for one in wanted_ones for name in (one, _DYNAMIC + one)]
    stems = [by_quantization[one] for one in named if one in by_quantization]
    if wanted is None and len(by_quantization) == 1:
        stems = [*by_quantization.values()]
    if not stems:
        offered = ", ".join(f"{name}:{one.upper()}" for one in sorted(by_quantization) if one)
        raise ExportError(
            f"{name} has no GGUF file of {wanted or 'Q4_K_M or Q8_0'}",
            remedy=f"choose one of {offered}" if offered else "name the model without a quantization",
        )
    return [file.path for file in files if file.stem == stems[0]]


class _GgufFile(NamedTuple):
    """A GGUF file with a model, or a part of it.

    Attributes:
        stem: the path without its ending and the number of the part.
        quantization: the one that its name tells, lower-case; empty: it tells none.
    """

    path: str
    stem: str
    quantization: str


def _gguf_files(name: str) -> list[_GgufFile]:
    """Return the GGUF files of a model on the hub but for those with its part for images, `mmproj`."""
    from huggingface_hub import HfApi

    found = filter(None, map(_GGUF.fullmatch, HfApi().list_repo_files(name)))
    files = [_GgufFile(match[0], match["stem"], (match["quantization"] or "").lower()) for match in found]
    return [file for file in files if "mmproj" not in file.path.lower()]
