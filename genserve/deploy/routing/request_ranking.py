"""Request ranking: the order in which the replicas of a model are asked to take a request.

A generation goes where its prompt is cached, unless too much waits there (`prefix_router.py`). A request of
a KServe sequence goes to the replica that holds the state of the sequence, and to no other. All other
requests go to the replica with the least to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Generic, TypeAlias, TypeVar

from genserve.deploy.replica.replica_load import LoadEstimates, ReplicaLoad
from genserve.deploy.routing.prefix_router import PrefixRouter
from genserve.engine.admission_control import RejectionReason
from genserve.engine.generation_request import GenerationRequest
from genserve.engine.prefix_cache import block_keys, root_key
from genserve.inference import InferenceRequest

ReplicaId = TypeVar("ReplicaId", bound=Hashable)
# How many replicas are asked to take a request: under overload each one more is work for nothing.
MAX_ASKED = 3
SequenceId: TypeAlias = tuple[str, int | str]  # the name of the model, and the correlation id

_MAX_SEQUENCES = 65_536


class RequestRanking(Generic[ReplicaId]):
    """Ranks the replicas of one model. For one thread.

    A replica that has ended is forgotten with `keep_only`, and what is sent to it later is ignored. The next
    request of a sequence that it held goes to another replica, which rejects it as Triton rejects a sequence
    that it does not know: it "must specify the START flag". So a sequence never starts again without its
    client's knowing.
    """

    def __init__(self, **weights: float) -> None:
        """Start with no replica known; for `weights`, see `PrefixRouter`."""
        self._weights = weights
        self._block_size = 1
        self._prefixes: PrefixRouter[ReplicaId] = PrefixRouter(1, num_blocks=0, **weights)
        self._estimates: LoadEstimates[ReplicaId] = LoadEstimates()
        self._observed: dict[ReplicaId, ReplicaLoad] = {}
        self._kept: frozenset[ReplicaId] | None = None  # None: all, before the first `keep_only`
        self._sent_to: dict[Hashable, ReplicaId] = {}  # by request
        self._sequences: OrderedDict[SequenceId, ReplicaId] = OrderedDict()  # least recently used first

    def observe(self, replica: ReplicaId, load: ReplicaLoad) -> None:
        """Record the last statistics of a replica; does nothing if they are known already."""
        if self._observed.get(replica) == load:
            return
        self._observed[replica] = load
        self._estimates.observe(replica, load)
        if load.block_size not in (0, self._block_size):
            self._block_size = load.block_size
            self._prefixes = PrefixRouter(load.block_size, num_blocks=load.num_blocks, **self._weights)

    def rank(
        self, request: object, replicas: Collection[ReplicaId], *, holding: Collection[ReplicaId] = ()
    ) -> list[ReplicaId]:
        """Return the replicas that are asked to take a request, the best one first; see `asked_replicas`.

        Args:
            request: a `GenerationRequest` or an `InferenceRequest`; nothing is known about any other object.
            replicas: the replicas that may take any request; at least one.
            holding: other replicas, which keep the sequences that they hold, though they cannot be called at
                the moment or are about to end.
        """
        if isinstance(request, InferenceRequest) and request.correlation_id:
            sequence = request.model_name, request.correlation_id
            return [self._replica_of(sequence, replicas, holding=holding)]
        loads = {replica: self._estimates.load(replica) for replica in replicas}
        ranked = self._prefixes.rank(self._keys(request), loads)
        is_resumed = isinstance(request, GenerationRequest) and request.is_resumed
        return ranked[:MAX_ASKED] if is_resumed else asked_replicas(ranked, loads)

    def load(self, replica: ReplicaId) -> ReplicaLoad:
        """Return the estimated load of a replica."""
        return self._estimates.load(replica)

    def rejected(self, request: object, replica: ReplicaId, *, reason: str) -> None:
        """Record that a replica rejects a request; `reason` is the reason of the `Overloaded`.

        A replica that would reject any other request too is full.
        """
        is_late = isinstance(request, GenerationRequest) and request.params.priority > 0
        if is_late or not is_full(reason):
            return
        self._estimates.rejected(replica)
        if replica in self._observed:   # so that its next statistics count as new ones
            self._observed[replica] = replace(self._observed[replica], num_free=0)

    def sent(self, request_id: Hashable, request: object, replica: ReplicaId) -> None:
        """Record that a request is (about to be) sent to a replica, and no longer to any other."""
        before = self._sent_to.get(request_id)
        if before == replica:
            return
        if before is not None:
            self.ended(request_id, before)
        if self._kept is not None and replica not in self._kept:
            return
        self._sent_to[request_id] = replica
        num_tokens = 0
        if isinstance(request, GenerationRequest):
            keys = self._keys(request)
            cached = self._prefixes.cached_tokens(keys, [replica])[replica]
            num_tokens = len(request.prompt_token_ids) - cached
            num_blocks = self._observed.get(replica, ReplicaLoad()).num_blocks
            self._prefixes.routed(replica, keys, num_blocks=num_blocks)
        self._estimates.sent(request_id, replica, num_tokens=num_tokens)

    def ended(self, request_id: Hashable, replica: ReplicaId) -> None:
        """Record that a replica does no more for a request; does nothing if it was not sent there."""
        if self._sent_to.get(request_id) == replica:
            del self._sent_to[request_id]
            self._estimates.ended(request_id, replica)

    def keep_only(self, replicas: Collection[ReplicaId]) -> None:
        """Forget all other replicas, with their sequences."""
        self._kept = frozenset(replicas)
        for replica in {*self._observed, *self._sent_to.values()} - self._kept:
            self._observed.pop(replica, None)
            self._prefixes.forget(replica)
            self._estimates.forget(replica)
        self._sent_to = {one: replica for one, replica in self._sent_to.items() if replica in self._kept}
        for sequence in [one for one, replica in self._sequences.items() if replica not in self._kept]:
            del self._sequences[sequence]

    def _keys(self, request: object) -> Sequence[bytes]:
        if not isinstance(request, GenerationRequest):
            return ()
        # Here an adapter is known by its name.
        root = root_key(request.params.cache_salt, adapter=request.adapter)
        return _block_keys(request.prompt_token_ids, self._block_size, root)

    def _replica_of(
        self, sequence: SequenceId, replicas: Collection[ReplicaId], *, holding: Collection[ReplicaId]
    ) -> ReplicaId:
        """Return the replica that holds a sequence.

        A new sequence, or one of which only another ingress knows, belongs to the replica with the highest
        hash of both (rendezvous hashing): so all ingresses agree without a word, and the memory of the one
        that routed it is needed only when replicas come or go.
        """
        replica = self._sequences.pop(sequence, None)
        if replica is None or (replica not in replicas and replica not in holding):
            replica = max(replicas, key=lambda one: blake2b(f"{sequence} {one}".encode()).digest())
        self._sequences[sequence] = replica
        if len(self._sequences) > _MAX_SEQUENCES:
            self._sequences.popitem(last=False)
        return replica


def asked_replicas(
    ranked: Sequence[ReplicaId], loads: Mapping[ReplicaId, ReplicaLoad]
) -> list[ReplicaId]:
    """Return which of the replicas, the best one first, are asked in turn until one takes a request.

    They are the best replicas that are not known to be full, at most MAX_ASKED. If all replicas are full, the
    best one alone is asked: what is known may be a second old.
    """
    with_room = [replica for replica in ranked if loads[replica].has_room]
    return with_room[:MAX_ASKED] or list(ranked[:1])


def is_full(reason: str) -> bool:
    """Return whether a replica that rejects a request for this reason would reject any other one too."""
    return reason in (RejectionReason.MAX_QUEUE, RejectionReason.PREDICTED_WAIT)


@lru_cache(maxsize=256)
def _block_keys(token_ids: Sequence[int], block_size: int, root: bytes) -> Sequence[bytes]:
    """Return the keys of a prompt; remembered, since a request is ranked and sent, or ranked again."""
    return block_keys(token_ids, block_size=block_size, root=root)
