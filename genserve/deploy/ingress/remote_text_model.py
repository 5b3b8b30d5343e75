"""Remote text model: the tokenizer, template and plug-ins of a text model whose engine is in its replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.ingress.remote_engine import RemoteEngine, RemoteLogits
from genserve.deploy.replica.description import StageFolder, TextDescription, digest_of_files, stage_path
from genserve.errors import RepositoryError
from genserve.generation_metrics import Metrics
from genserve.repository.text_stages import TextStages
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.sequence_builder import SequenceBuilder
from genserve.textmodel.text_model import TextModel


def load_remote_text_model(
    name: str,
    described: TextDescription,
    stages: TextStages,
    *,
    replicas: LiveReplicas,
    identity: str,
    event_loop: asyncio.AbstractEventLoop,
    metrics: Metrics,
) -> TextModel:
    """Load what requests are validated and answers are written with; blocks.

    Args:
        name: the name of the text model.
        described: how a replica describes the model.
        stages: the stages in the ingress's copy of the repository.
        replicas: the replicas of the model.
        identity: the identity of the replicas that take its calls.
        event_loop: the loop on which replicas are called.
        metrics: the metrics of the ingress.

    Raises:
        RepositoryError: the files of the tokenizer or decoder stage cannot be loaded, or differ from the
            replicas' files.
    """
    tokenizer = stage_path(stages, "tokenizer", described.tokenizer.version)
    _check_same(tokenizer, described.tokenizer)
    logits = RemoteLogits(
        name, replicas, identity=identity, vocab_size=described.vocab_size, metadata=described.metadata
    )
    decoder = stages["decoder"].config
    assert decoder is not None  # since it is a text model
    folder = stage_path(stages, "decoder", described.decoder.version)
    _check_same(folder, described.decoder)
    path = folder / (decoder.default_model_filename or "model.py")
    decoding = load_decoding(path, name=decoder.name, parameters=described.decoder_parameters)
    loaded = Tokenizer.from_folder(tokenizer)
    builder = SequenceBuilder(name=name, tokenizer=loaded, decoding=decoding, logits=logits)
    engine = RemoteEngine(
        name,
        replicas,
        event_loop=event_loop,
        logits=logits,
        builder=builder,
        rejections=metrics.rejections,
    )
    model = TextModel(
        name=name,
        tokenizer=loaded,
        engine=engine,
        decoding=decoding,
        builder=builder,
        logits=logits,
        default_sampling_params=described.default_sampling_params,
        weights_bytes=described.weights_bytes,
    )
    model.temperatures = described.temperatures  # a replica has compared the files
    return model


def _check_same(folder: Path, described: StageFolder) -> None:
    """Reject files that differ from the replicas' files.

    The token ids of another tokenizer would mean other texts to them, and another decoder stage would read
    their answers otherwise.
    """
    if digest_of_files(folder) != described.digest:
        raise RepositoryError(
            f"the files of {described.model!r}, version {described.version}, differ between the ingress and "
            "the replicas",
            remedy="give all machines the same repository; if the files have changed since the replicas "
            "started, run `genserve deploy ray` again",
        )
