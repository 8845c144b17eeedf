"""Which gradients travel together, and in which order."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.gradients.bucket import Bucket
from collective_strategy.gradients.inventory import Communicators, Inventory, Route


@dataclass(frozen=True)
class BucketSizes:
    """Bytes. Gradients are packed up to ``packed``; the first bucket, whose all-reduce starts first of all, up to
    ``first``. They are moved into their bucket as soon as ``moved`` of them are ready."""

    moved: int = 256 << 10
    packed: int = 4 << 20
    first: int = 1 << 20

    @classmethod
    def suited_to(cls, capabilities: Capabilities, wished: BucketSizes | None = None) -> BucketSizes:
        """What suits a backend, or what somebody wished for; a backend that compiles takes one list per group."""
        if capabilities.compiles:
            return cls(packed=sys.maxsize, first=sys.maxsize)
        return wished or cls(packed=capabilities.packed_bytes)


class Plan:
    """The buckets for one choice of trainable parameters, in the order in which all ranks launch them.

    ``number`` says which agreement of the ranks it comes from, ``order`` in which order the gradients of the backward
    before were ready.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.number = 0
        self.buckets = buckets
        self.where = {i: position for position, bucket in enumerate(buckets) for i in bucket.members}
        self.order: list[int] = []

    def follow(self, order: list[int]) -> None:
        """The next backward is expected to be ready with the gradients in this order; it sets the triggers."""
        if order == self.order:
            return
        self.order = order
        last = {self.where[i]: i for i in order if i in self.where}
        for position, i in last.items():
            self.buckets[position].trigger = i
        places = {i: place for place, i in enumerate(order)}
        for bucket in self.buckets:
            for part, members in enumerate(bucket.parts):
                known = [i for i in bucket.members[members.start : members.stop] if i in places]
                if known:
                    bucket.triggers[part] = max(known, key=places.__getitem__)

    @classmethod
    def make(
        cls,
        inventory: Inventory,
        communicators: Communicators,
        members: list[int],
        sizes: BucketSizes,
        reduce_dtype: torch.dtype | None,
        compression: torch.dtype | None,
        *,
        interleaved: bool,
    ) -> Plan:
        """Buckets for ``members`` (indices)."""
        kind = Bucket
        if communicators.world.capabilities.compiles:
            from collective_strategy.gradients.listed_bucket import ListedBucket

            kind = ListedBucket
        cut = cut_into_buckets(inventory, members, sizes, reduce_dtype, compression, interleaved=interleaved)
        return cls(
            [kind(m, inventory, route, communicators.over(route.axes), wire, sizes.moved) for m, route, wire in cut]
        )


def cut_into_buckets(
    inventory: Inventory,
    members: list[int],
    sizes: BucketSizes,
    reduce_dtype: torch.dtype | None,
    compression: torch.dtype | None,
    *,
    interleaved: bool,
) -> list[tuple[list[int], Route, torch.dtype]]:
    """Cuts ``members`` (indices) into buckets, last registered first, because backward is ready with them first. Local.

    Returns:
        Members, route and dtype on the way of each, in the order in which they are sent.
    """
    open_buckets: dict[tuple[Route, torch.dtype, torch.device], tuple[list[int], int]] = {}
    closed: list[tuple[list[int], Route, torch.dtype]] = []
    started: set[tuple[Route, torch.dtype, torch.device]] = set()
    for i in reversed(members):
        parameter, route = inventory.parameters[i], inventory.routes[i]
        assert route is not None
        wire = _wire_dtype(parameter.dtype, reduce_dtype, compression)
        key = (route, wire, parameter.device)
        bucket, nbytes = open_buckets.pop(key, ([], 0))
        bucket.append(i)
        nbytes += parameter.numel() * wire.itemsize
        if nbytes >= (sizes.packed if key in started else sizes.first):
            closed.append((bucket, route, wire))
            started.add(key)
        else:
            open_buckets[key] = bucket, nbytes
    closed.extend((bucket, key[0], key[1]) for key, (bucket, _) in open_buckets.items())
    # A bucket is ready when its first registered parameter is.
    closed.sort(key=lambda item: -min(item[0]))
    if not interleaved:
        closed.sort(key=lambda item: item[1].axes)
    return closed


def _wire_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None, compression: torch.dtype | None) -> torch.dtype:
    if dtype.is_floating_point and reduce_dtype is not None and dtype.itemsize < reduce_dtype.itemsize:
        return reduce_dtype
    if dtype.is_floating_point and compression is not None and dtype.itemsize > compression.itemsize:
        return compression
    return dtype
