"""Remote inference: answers requests with named tensors by a model whose replicas run in other processes."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import replace

from genserve.deploy.ingress.live_replicas import LiveReplicas
from genserve.deploy.replica_messages import Call
from genserve.errors import SEE_LOG, Closed, GenserveError, ModelFailed
from genserve.inference import Inference

logger = logging.getLogger(__name__)


class RemoteInference:
    """Passes each inference to a replica, which validates and queues it; a `ModelRuntime`.

    Attributes:
        num_waiting: inferences that waited in the replicas at their last report.
    """

    def __init__(
        self,
        replicas: LiveReplicas,
        *,
        identity: str,
        event_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Call replicas with an identity on an event loop."""
        self.num_waiting = 0
        self._replicas = replicas
        self._identity = identity
        self._event_loop = event_loop

    @property
    def ready(self) -> bool:
        """Whether a replica can take a request."""
        return self._replicas.num_alive > 0

    def submit(self, inference: Inference) -> None:
        """Call a replica; a rejection is an error response."""
        self._event_loop.call_soon_threadsafe(self._start, inference)

    def close(self) -> None:
        """Do nothing: who unloads a version fails its inferences, which cancels the calls."""

    def _start(self, inference: Inference) -> None:
        task = self._event_loop.create_task(self._run(inference))

        def cancel() -> None:
            with suppress(RuntimeError):  # the event loop is closed
                self._event_loop.call_soon_threadsafe(task.cancel)

        inference.when_cancelled(cancel)

    async def _run(self, inference: Inference) -> None:
        inference.started_ns = inference.submitted_ns
        # Spans are of this process.
        request = replace(inference.request, cause=None)
        call = Call(identity=self._identity, request=request)
        try:
            async with aclosing(self._replicas.replicas.infer(call)) as arriving:  # type: ignore[type-var]
                async for response, final in arriving:
                    inference.send(response, final=final)
                    if inference.all_read is not None and not final:
                        await inference.all_read()  # a slow client would fill the memory
        except GenserveError as error:
            if not isinstance(error, Closed):  # by `send`: somebody has ended it
                inference.fail(error)
        except asyncio.CancelledError:
            inference.fail_cancelled()
            raise
        except Exception:
            logger.exception("a call of model %s failed", inference.request.model_name)
            inference.fail(ModelFailed("the call of a replica failed", remedy=SEE_LOG))
