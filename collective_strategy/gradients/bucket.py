"""Buckets: gradients that travel together."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.inventory import Inventory, Route


class Bucket:
    """Gradients of one route, dtype and device that are reduced by one all-reduce, in a buffer that outlives the step.

    Gradients are scaled into the buffer and taken out of ``.grad``, so that a piece that comes later is seen. They go
    part by part as they become ready, while they are warm in the cache, which their memory then is for the gradients of
    the next layers. After the all-reduce ``.grad`` is a view of the buffer.

    Args:
        members: Indices into the inventory.
        inventory: Where the parameters are.
        route: Their way.
        group: The collective of the route.
        wire: The dtype on the way.
        moved: Bytes of gradients that are moved together; larger ones go alone.

    Attributes:
        trigger: The member whose hook looks whether all are there: the last one of the backward before.
        triggers: For every part the member whose hook moves it, likewise.
        parts: The places in ``members`` of the parts, consecutive.
        outlives_step: Whether the results' memory is kept, also where the user drops them.
    """

    outlives_step: ClassVar[bool] = True

    def __init__(
        self,
        members: list[int],
        inventory: Inventory,
        route: Route,
        group: Collective,
        wire: torch.dtype,
        moved: int,
    ) -> None:
        nbytes = {i: inventory.parameters[i].numel() * wire.itemsize for i in members}
        self.members = sorted(members, key=lambda i: nbytes[i] >= moved)  # the small ones, which go together, first
        self.parts = self._cut([nbytes[i] for i in self.members], moved)
        # registered first, so the last one that a plain backward is ready with
        self.trigger = min(members)
        self.triggers = [min(self.members[place] for place in part) for part in self.parts]
        self.nbytes = sum(nbytes.values())
        self.route = route
        self.group = group
        self._parameters = [inventory.parameters[i] for i in self.members]
        self._wire = wire
        self._device = self._parameters[0].device
        self._numels = [parameter.numel() for parameter in self._parameters]
        self._moved: set[int] = set()
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._slices: list[Tensor] = []
        self._unshared = self._address = 0
        self._handle: Handle | None = None

    @staticmethod
    def _cut(nbytes: list[int], moved: int) -> list[range]:
        """Consecutive places of which ``moved`` bytes are moved together."""
        parts: list[range] = []
        start = filled = 0
        for place, size in enumerate(nbytes):
            if place > start and filled + size > moved:
                parts.append(range(start, place))
                start, filled = place, 0
            filled += size
        return [*parts, range(start, len(nbytes))]

    def _open(self) -> None:
        """Takes the buffer of the backward before, or a new one if somebody holds gradients in it, or moved them."""
        if self._buffer is None or (not self._moved and self._is_taken(self._buffer)):
            self._buffer = self.group.shared_empty(sum(self._numels), self._wire, self._device)
            self._address = self._buffer.data_ptr()
            pieces = self._buffer.split(self._numels)
            self._views = [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]
            self._slices = list(self._buffer.split([sum(self._numels[place] for place in part) for part in self.parts]))
            del pieces
            self._unshared = _holders(self._buffer)

    def _is_taken(self, buffer: Tensor) -> bool:
        return _holders(buffer) > self._unshared or buffer.data_ptr() != self._address  # by share_memory_(), say

    @torch.no_grad()
    def move(self, part: int) -> None:
        """Moves the dense gradients of a part out of ``.grad`` into the buffer; a second piece on top of the first.

        A sparse one stays in ``.grad``, and goes another way.
        """
        places = self.parts[part]
        parameters = self._parameters[places.start : places.stop]
        gradients = [g for parameter in parameters if (g := parameter.grad) is not None and not g.is_sparse]
        if not gradients:
            return
        self._open()
        if len(gradients) < len(places) or not self._moved.isdisjoint(places):
            for place in places:
                self._move_one(place)
            return
        views = self._views[places.start : places.stop]
        # scaled before the sum, as DistributedDataParallel does: large fp16 gradients do not overflow in it
        if len(gradients) == 1 and gradients[0].dtype == self._wire:
            torch.mul(gradients[0].detach(), self.route.scale, out=views[0])
        else:
            torch._foreach_copy_(views, gradients)
            self._slices[part].mul_(self.route.scale)
        for parameter in parameters:
            parameter.grad = None
        self._moved.update(places)

    def _move_one(self, place: int) -> None:
        gradient = self._parameters[place].grad
        if gradient is None or gradient.is_sparse:
            return
        self._parameters[place].grad = None
        if place in self._moved:
            self._views[place].add_(gradient, alpha=self.route.scale)
        else:
            self._views[place].copy_(gradient).mul_(self.route.scale)
            self._moved.add(place)

    @torch.no_grad()
    def fill(self) -> list[int]:
        """Completes the buffer with what lies in ``.grad``, and with zeros. Returns the members that had a gradient."""
        for part in range(len(self.parts)):
            self.move(part)
        self._open()
        moved, self._moved = self._moved, set()
        if len(moved) == len(self.members):
            return self.members
        for k, view in enumerate(self._views):
            if k not in moved:
                view.zero_()
        return [self.members[k] for k in moved]

    @torch.no_grad()
    def abandon(self) -> None:
        """Nothing is sent: what was moved is put back."""
        for place in self._moved:
            parameter = self._parameters[place]
            local = self._views[place].to(parameter.dtype) / self.route.scale
            parameter.grad = local if parameter.grad is None else parameter.grad + local
        self._moved.clear()

    def send(self) -> None:
        """Starts the all-reduce."""
        assert self._buffer is not None
        started = self.group.all_reduce_(self._buffer, "sum", async_op=True)
        self._handle = started if isinstance(started, Handle) else CompletedHandle(started)

    def results(self) -> dict[int, Tensor]:
        """By member, the tensors in which the reduced gradients are when `wait` has returned."""
        # tensors of their own, so that we see when nobody holds them
        return {i: view.detach() for i, view in zip(self.members, self._views, strict=True)}

    def wait(self) -> dict[int, Tensor]:
        """Waits for the all-reduce. Returns the results that must take the place of others, in their parameter's dtype
        and strides."""
        assert self._handle is not None
        unlike: list[int] = []
        if {p.dtype for p in self._parameters} != {self._wire} or not all(map(Tensor.is_contiguous, self._parameters)):
            unlike = [k for k, p in enumerate(self._parameters) if p.dtype != self._wire or not p.is_contiguous()]
        self._handle.wait()
        self._handle = None
        return {
            self.members[k]: torch.empty_like(self._parameters[k], requires_grad=False).copy_(self._views[k])
            for k in unlike
        }


def _holders(buffer: Tensor) -> int:
    """How many tensors share the buffer's memory."""
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
