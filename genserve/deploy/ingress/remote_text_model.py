"""Remote text model: the tokenizer, template and plug-ins of a text model whose engine is in its replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_engine import RemoteEngine
from genserve.deploy.replica.description import StageFolder, TextDescription, digest_of_files, stage_path
from genserve.errors import RepositoryError
from genserve.repository.text_stages import TextStages
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.text_model import TextModel


def load_remote_text_model(
    name: str,
    described: TextDescription,
    stages: TextStages,
    *,
    replicas: LiveReplicas,
    event_loop: asyncio.AbstractEventLoop,
) -> TextModel:
    """Load what requests are validated and answers are written with; blocks.

    Args:
        name: of the text model.
        described: by a replica.
        stages: in the ingress's copy of the repository.
        replicas: of the model.
        event_loop: on which they are called.

    Raises:
        RepositoryError: the files of the tokenizer or decoder stage cannot be loaded, or those of the
            tokenizer are not the replicas'.
    """
    tokenizer = stage_path(stages, "tokenizer", described.tokenizer.version)
    _check_same(tokenizer, described.tokenizer)
    decoder = stages["decoder"].config
    assert decoder is not None  # of a text model
    folder = stage_path(stages, "decoder", described.decoder.version)
    path = folder / (decoder.default_model_filename or "model.py")
    decoding = load_decoding(path, name=decoder.name, parameters=decoder.parameters)
    engine = RemoteEngine(
        name,
        replicas,
        event_loop=event_loop,
        logits=described.logits,
        capacity=described.capacity,
    )
    return TextModel(
        name=name,
        tokenizer=Tokenizer.from_folder(tokenizer),
        engine=engine,
        decoding=decoding,
        logits=described.logits,
        default_sampling_params=described.default_sampling_params,
        weights_bytes=described.weights_bytes,
    )


def _check_same(folder: Path, described: StageFolder) -> None:
    """Reject a tokenizer that is not the replicas': its token ids would mean other texts to them."""
    if digest_of_files(folder) != described.digest:
        raise RepositoryError(
            f"the files of {described.model!r}, version {described.version}, differ between the ingress and "
            "the replicas",
            remedy="give all machines the same repository; if the files have changed since the replicas "
            "started, run `genserve deploy ray` again",
        )
