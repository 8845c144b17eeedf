"""Buckets: which gradients travel together, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.inventory import Communicators, Inventory, Route


@dataclass(frozen=True)
class BucketSizes:
    """Bytes: a gradient of ``large`` or more travels alone and uncopied; others are packed up to ``packed``, the first
    bucket, which is ready last of all to be useful and first of all to start, up to ``first``."""

    large: int = 256 << 10
    packed: int = 4 << 20
    first: int = 1 << 20


class Bucket:
    """Gradients of one route, dtype and device that are reduced by one all-reduce.

    Args:
        members: Indices into the inventory.
        inventory: Where the parameters are.
        route: Their way.
        group: The collective of the route.
        wire: The dtype on the way.
    """

    def __init__(
        self, members: list[int], inventory: Inventory, route: Route, group: Collective, wire: torch.dtype
    ) -> None:
        self.members = members
        self.route = route
        self.group = group
        self._parameters = [inventory.parameters[i] for i in members]
        self._wire = wire
        self._device = self._parameters[0].device
        self._numels = [parameter.numel() for parameter in self._parameters]
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._unshared = 0
        self._alone: Tensor | None = None
        self._handle: Handle | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return sum(self._numels) * self._wire.itemsize

    def launch(self, gradients: list[Tensor | None]) -> None:
        """Starts the all-reduce of ``gradients`` (in the order of `members`; None counts as zeros).

        A single contiguous gradient is reduced in place.
        """
        alone = gradients[0] if len(gradients) == 1 else None
        if alone is not None and _is_plain(alone, self._wire):
            self._alone = alone
            data = alone
        else:
            self._alone = None
            data = self._filled(gradients)
        if self.route.scale != 1.0:
            data.mul_(self.route.scale)
        started = self.group.all_reduce_(data, "sum", async_op=True)
        self._handle = started if isinstance(started, Handle) else CompletedHandle(started)

    def finish(self) -> list[Tensor]:
        """Waits and returns the reduced gradients, in the order of `members`, of the parameters' dtypes."""
        assert self._handle is not None
        self._handle.wait()
        self._handle = None
        if self._alone is not None:
            result, self._alone = [self._alone], None
            return result
        results = []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.dtype != self._wire or not parameter.is_contiguous():
                results.append(torch.empty_like(parameter, requires_grad=False).copy_(view))
            else:
                results.append(view.detach())  # no view to autograd, so that `.grad.detach_()` works
        return results

    def _filled(self, gradients: list[Tensor | None]) -> Tensor:
        buffer = self._free_buffer()
        present = [
            (view, gradient) for view, gradient in zip(self._views, gradients, strict=True) if gradient is not None
        ]
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient.detach() for _, gradient in present])
        return buffer

    def _free_buffer(self) -> Tensor:
        """The buffer of the last step if nobody holds a gradient in it any more, else a new one."""
        if self._buffer is None or _holders(self._buffer) > self._unshared:
            self._buffer = torch.empty(sum(self._numels), dtype=self._wire, device=self._device)
            self._views = [
                piece.view(parameter.shape)
                for piece, parameter in zip(self._buffer.split(self._numels), self._parameters, strict=True)
            ]
            self._unshared = _holders(self._buffer)
        return self._buffer


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
        cut = cut_into_buckets(inventory, members, sizes, reduce_dtype, compression, interleaved=interleaved)
        return cls([Bucket(m, inventory, route, communicators.over(route.axes), wire) for m, route, wire in cut])


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
        nbytes = parameter.numel() * wire.itemsize
        if nbytes >= sizes.large:
            closed.append(([i], route, wire))
            continue
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


def _is_plain(gradient: Tensor, wire: torch.dtype) -> bool:
    return gradient.is_contiguous() and gradient.dtype == wire and not gradient.requires_grad and not gradient.is_sparse


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
