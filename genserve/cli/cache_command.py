"""The command `genserve cache`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from genserve.cli.completion_command import model_names
from genserve.cli.flags import RepositoryFlags
from genserve.cli.parser import UsageError
from genserve.errors import InvalidRequest, RepositoryError
from genserve.settings import Flag, flag

if TYPE_CHECKING:
    from genserve.prompt import Prompt
    from genserve.textmodel.text_model import TextModel

_MAX_FILE_BYTES = 64 << 20
# Beginnings of a user's turn that share no token, so that a chat's tokens are the same up to there.
_FIRST_WORDS = ("A", "z", "1", "?", "é")


@dataclass(frozen=True, kw_only=True)
class CacheFlags(RepositoryFlags):
    """The flags of `genserve cache`."""

    action: Literal["build"] = flag(
        MISSING, Flag(help="build: compute the beginning of prompts.", is_argument=True)
    )
    model: str = flag(MISSING, Flag(help="A text model.", is_argument=True, complete=model_names))
    system: Path | None = flag(None, Flag(help="File with the system message of chats."))
    tools: Path | None = flag(None, Flag(help="JSON file with the `tools` of chats, as OpenAI has them."))
    prompt: Path | None = flag(None, Flag(help="File with the beginning of prompts that are no chats."))


def cache(flags: CacheFlags) -> None:
    """Compute the beginning of prompts into the repository, for all servers that load the model.

    The blocks of the KV cache are written below `prefixes` in the folder of the model's logits stage, so they
    ship with the model. Chats that begin with the same system message and tools, or prompts that begin with
    the text, start there. Build again after a change of the model, of its chat template or of genserve.
    """
    from genserve.cli.model_choice import bring_model
    from genserve.cli.opened_models import started
    from genserve.engine.disk_cache import PrefixCacheFolder
    from genserve.repository.options import RepositoryOptions
    from genserve.repository.repository import Repository
    from genserve.textmodel.logits_config import PREFIXES_FOLDER

    prompts = _prompts(flags)
    folder, name = bring_model(flags.model, repository=flags.model_repository)
    stages = Repository([folder]).text_stages(name)
    if stages is None:
        raise RepositoryError(f"{name!r} is not a text model", remedy="see `genserve models`")
    prefixes = stages["logits"].latest_version() / PREFIXES_FOLDER
    whole_disk = PrefixCacheFolder(path=prefixes, max_bytes=shutil.disk_usage(folder).total)
    repository = Repository([folder], options=RepositoryOptions(prefix_cache_folder=whole_disk))
    try:
        with started(repository, name) as model:    # whose end writes the blocks
            token_ids = _compute(model, prompts)
    finally:
        with suppress(OSError):
            prefixes.rmdir()    # unless there are any
    if model.disk_cache is None:
        raise RepositoryError(
            f"no block of {name!r} was written",
            remedy='a model with `prefix_cache: "false"` in its config or without a KV cache stores none; '
            "for other models the log above has the reason",
        )
    num_stored = model.disk_cache.num_stored_tokens(token_ids)
    if num_stored < len(token_ids):
        raise RepositoryError(
            f"of the first {len(token_ids):,} tokens only {num_stored:,} were written to {prefixes}",
            remedy="the log above has the reason; the next run goes on there",
        )
    for path in (prefixes, *prefixes.iterdir()):
        path.chmod(0o755)       # a server may run as another user
    num_bytes = sum(path.stat().st_size for path in prefixes.rglob("*.kv"))
    print(f"computed the first {num_stored:,} tokens; {prefixes} has {num_bytes / 1e6:,.1f} MB")


def _prompts(flags: CacheFlags) -> list[Prompt]:
    """Return prompts that have the beginning of the files in common, and no more.

    Raises:
        UsageError: the flags name the files of neither or of both kinds of prompts.
        InvalidRequest: a file cannot be read, or is not valid.
    """
    from genserve.prompt import read_chat, read_prompt

    is_chat = flags.system is not None or flags.tools is not None
    if is_chat == (flags.prompt is not None):
        raise UsageError("name the files of a chat, --system, --tools or both; or that of a text, --prompt")
    if flags.prompt is not None:
        return [read_prompt(_read(flags.prompt))]
    system = [] if flags.system is None else [{"role": "system", "content": _read(flags.system)}]
    tools = None
    if flags.tools is not None:
        try:
            tools = json.loads(_read(flags.tools))
        except ValueError as error:
            raise InvalidRequest(f"{flags.tools} is not JSON: {error}") from None
    return [
        read_chat([*system, {"role": "user", "content": word}], tools=tools) for word in _FIRST_WORDS
    ]


def _read(path: Path) -> str:
    from genserve.files import read_regular_text

    try:
        return read_regular_text(path, max_bytes=_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error


def _compute(model: TextModel, prompts: Sequence[Prompt]) -> Sequence[int]:
    """Compute the full blocks that prompts have in common, and return the tokens of these."""
    from genserve.engine.delta_streams import DeltaStream
    from genserve.sampling.sampling_params import SamplingParams

    encoded = zip(*map(model.encode, prompts), strict=False)
    token_ids = [same[0] for same in takewhile(lambda tokens: len({*tokens}) == 1, encoded)]
    size = model.logits.block_size
    num_tokens = len(token_ids) // size * size
    if not num_tokens:
        raise InvalidRequest(
            f"the prompts have {len(token_ids)} tokens in common, and a block of the KV cache holds {size}",
            remedy="a prompt this short needs no cache",
        )
    token_ids = token_ids[:num_tokens]
    request = model.prepare(token_ids, SamplingParams(max_tokens=1))
    with DeltaStream(model.engine, request) as stream:
        for _ in stream:
            pass
    return token_ids
