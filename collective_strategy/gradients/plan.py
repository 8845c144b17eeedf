"""Buckets: which gradients travel together, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.inventory import Communicators, Inventory, Route


@dataclass(frozen=True)
class BucketSizes:
    """Bytes. Gradients are packed up to ``packed``; the first bucket, whose all-reduce starts first of all, up to
    ``first``. A gradient of ``large`` or more is moved into its bucket as soon as it is ready; autograd accumulates
    smaller ones there itself."""

    large: int = 256 << 10
    packed: int = 8 << 20
    first: int = 1 << 20


class Bucket:
    """Gradients of one route, dtype and device that are reduced by one all-reduce, in a buffer that outlives the step.

    Small gradients are accumulated right in the buffer: before backward, ``.grad`` of their parameters is made a view
    of it. A large one is scaled into the buffer when it is ready; its memory is then free, and warm in the cache, for
    the gradient of the next layer.

    Args:
        members: Indices into the inventory.
        inventory: Where the parameters are.
        route: Their way.
        group: The collective of the route.
        wire: The dtype on the way.
        large: Bytes from which a gradient is large.
        flags: How many numbers travel behind the gradients, see `send`.
    """

    def __init__(
        self,
        members: list[int],
        inventory: Inventory,
        route: Route,
        group: Collective,
        wire: torch.dtype,
        large: int,
        flags: int = 0,
    ) -> None:
        nbytes = {i: inventory.parameters[i].numel() * wire.itemsize for i in members}
        self.members = sorted(members, key=lambda i: nbytes[i] >= large)  # the small ones, cleared as one, come first
        self.route = route
        self.group = group
        self.flags = flags
        self.nbytes = sum(nbytes.values())
        self.large = {i: place for place, i in enumerate(self.members) if nbytes[i] >= large}
        self._parameters = [inventory.parameters[i] for i in self.members]
        self._wire = wire
        self._device = self._parameters[0].device
        self._numels = [parameter.numel() for parameter in self._parameters]
        self._numel = sum(self._numels)
        self._small = sum(self._numels[: len(members) - len(self.large)])
        self._dense = [False] * len(members)  # had a dense gradient once; a sparse one would become dense in a view
        self._moved: set[int] = set()
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._unshared = 0
        self._handle: Handle | None = None

    def begin(self) -> None:
        """Before a backward: takes a free buffer, and lets autograd accumulate small gradients there."""
        if self._buffer is None or _holders(self._buffer) > self._unshared:
            self._buffer = torch.empty(self._numel + self.flags, dtype=self._wire, device=self._device)
            pieces = self._buffer[: self._numel].split(self._numels)
            self._views = [
                piece.view(parameter.shape).detach()  # each a tensor of its own, as `.grad` must be
                for piece, parameter in zip(pieces, self._parameters, strict=True)
            ]
            del pieces
            self._unshared = _holders(self._buffer)
        self._moved.clear()
        if not self._small:
            return
        self._buffer[: self._small].zero_()
        for place in range(len(self.members) - len(self.large)):
            parameter = self._parameters[place]
            if self._dense[place] and parameter.grad is None and parameter.requires_grad:
                parameter.grad = self._views[place]

    def abandon(self, fired: Container[int]) -> None:
        """Nothing is sent: gradients that are in the buffer become the user's."""
        for place, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if place in self._moved:
                local = view.to(parameter.dtype) / self.route.scale
                parameter.grad = local if parameter.grad is None else parameter.grad + local
            elif parameter.grad is view:
                parameter.grad = view.detach() if self.members[place] in fired else None
        self._moved.clear()

    def move(self, place: int) -> bool:
        """Moves a dense gradient out of ``.grad`` into the buffer. A second piece goes on top of the first."""
        parameter, view = self._parameters[place], self._views[place]
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return False  # a sparse gradient stays in .grad and goes the other way
        parameter.grad = None  # a gradient that comes after this is a piece of its own
        gradient = gradient.detach()
        scale = self.route.scale if place >= len(self.members) - len(self.large) else 1.0
        if place in self._moved:
            view.add_(gradient, alpha=scale)
        elif scale != 1.0 and gradient.dtype == self._wire:
            torch.mul(gradient, scale, out=view)
        else:
            view.copy_(gradient)
            if scale != 1.0:
                view.mul_(scale)
        self._moved.add(place)
        self._dense[place] = self._parameters[place].dtype == self._wire and parameter.is_contiguous()
        return True

    def fill(self) -> list[int]:
        """Completes the buffer with what lies in ``.grad``, and takes it out of there.

        Returns:
            The members whose gradient was there, except those that autograd accumulated in the buffer.
        """
        found = []
        for place, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is view:
                parameter.grad = None
            elif self.move(place):
                found.append(self.members[place])
            elif self.members[place] in self.large and place not in self._moved:
                view.zero_()
        assert self._buffer is not None
        if self.route.scale != 1.0 and self._small:
            self._buffer[: self._small].mul_(self.route.scale)
        return found

    def send(self, flags: list[float] | None = None) -> None:
        """Starts the all-reduce. ``flags`` travel behind the gradients and are summed."""
        buffer = self._buffer
        assert buffer is not None
        if self.flags:
            assert flags is not None
            buffer[self._numel :] = torch.tensor(flags, dtype=self._wire)
        started = self.group.all_reduce_(buffer, "sum", async_op=True)
        self._handle = started if isinstance(started, Handle) else CompletedHandle(started)

    def results(self) -> list[Tensor]:
        """The tensors, in the order of `members`, in which the reduced gradients are when `wait` has returned."""
        return [view.detach() for view in self._views]  # tensors of their own, so that we see when nobody holds them

    def wait(self) -> list[float]:
        """Waits for the all-reduce and returns the summed flags."""
        assert self._handle is not None
        assert self._buffer is not None
        self._handle.wait()
        self._handle = None
        flags: list[float] = self._buffer[self._numel :].tolist() if self.flags else []
        return flags

    def converted(self, results: list[Tensor]) -> list[Tensor]:
        """The results in the dtypes and strides of their parameters."""
        return [
            result
            if parameter.dtype == self._wire and parameter.is_contiguous()
            else torch.empty_like(parameter, requires_grad=False).copy_(result)
            for parameter, result in zip(self._parameters, results, strict=True)
        ]


HEADER = 3  # flags that concern the whole model, see `Flags`
LAST = 2  # at most so many buckets wait for the end of backward


class Plan:
    """The buckets for one choice of trainable parameters, in the order in which all ranks launch them.

    ``number`` says which agreement of the ranks it comes from.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self.number = 0
        self.buckets = buckets
        self.where = {i: position for position, bucket in enumerate(buckets) for i in bucket.members}

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
        if communicators.world.capabilities.compiles:
            from collective_strategy.gradients.listed_bucket import ListedBucket

            unlimited = BucketSizes(packed=sys.maxsize, first=sys.maxsize)
            cut = cut_into_buckets(inventory, members, unlimited, reduce_dtype, compression, interleaved=interleaved)
            return cls([ListedBucket(m, inventory, r, communicators.over(r.axes), wire, 0) for m, r, wire in cut])
        cut = cut_into_buckets(inventory, members, sizes, reduce_dtype, compression, interleaved=interleaved)
        # The last buckets are ready at the end of backward, when it is known which parameters were used: they take it
        # with them, one for each group. Not those of an earlier turn, which would keep the others waiting.
        widths = {axes: HEADER + len(group) for axes, group in inventory.by_group().items()}
        buckets: list[Bucket] = []
        for bucket, route, wire in reversed(cut):
            width = widths.pop(route.axes, 0) if len(buckets) < LAST and wire.is_floating_point else 0
            buckets.append(Bucket(bucket, inventory, route, communicators.over(route.axes), wire, sizes.large, width))
        return cls(buckets[::-1])


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
    open_buckets: dict[tuple[Route, torch.dtype, torch.device], list[int]] = {}
    closed: list[tuple[list[int], Route, torch.dtype]] = []
    started: set[tuple[Route, torch.dtype, torch.device]] = set()
    for i in reversed(members):
        parameter, route = inventory.parameters[i], inventory.routes[i]
        assert route is not None
        wire = _wire_dtype(parameter.dtype, reduce_dtype, compression)
        key = (route, wire, parameter.device)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(i)
        limit = sizes.packed if key in started else sizes.first
        if sum(inventory.parameters[j].numel() for j in bucket) * wire.itemsize >= limit:
            closed.append((open_buckets.pop(key), route, wire))
            started.add(key)
    closed.extend((bucket, key[0], key[1]) for key, bucket in open_buckets.items())
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


def _holders(buffer: Tensor) -> int:
    """How many tensors share the buffer's memory."""
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
