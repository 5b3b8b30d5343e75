"""Remote text model: the tokenizer, template and plug-ins of a text model whose engine is in its replicas."""

from __future__ import annotations

import asyncio
import time

from genserve.deploy.description import TextDescription, stage_path
from genserve.deploy.live_replicas import LiveReplicas
from genserve.deploy.remote_engine import RemoteEngine
from genserve.repository.text_stages import TextStages
from genserve.text.tokenizer import Tokenizer
from genserve.textmodel.decoder_stage import load_decoding
from genserve.textmodel.text_model import TextModel
from genserve.textmodel.text_model_loader import named_tool_format


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
        RepositoryError: the files of the tokenizer or decoder stage cannot be loaded.
    """
    decoder = stages["decoder"].config
    assert decoder is not None  # of a text model
    folder = stage_path(stages, "decoder", described.decoder.version)
    decoding = load_decoding(folder / (decoder.default_model_filename or "model.py"), name=decoder.name)
    engine = RemoteEngine(
        name,
        replicas,
        event_loop=event_loop,
        logits=described.logits,
        capacity=described.capacity,
    )
    return TextModel(
        name=name,
        tokenizer=Tokenizer.from_folder(stage_path(stages, "tokenizer", described.tokenizer.version)),
        engine=engine,
        plugins=decoding.plugins,
        only_samples=decoding.only_samples,
        tool_format=decoding.tool_format or named_tool_format(decoder),
        logits=described.logits,
        default_sampling_params=described.default_sampling_params,
        loaded_s=time.time(),
        weights_bytes=described.weights_bytes,
    )
