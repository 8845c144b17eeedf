"""Gradients that are reduced as they are, by one operation on a list, for backends that compile."""

from __future__ import annotations

import torch
from torch import Tensor

from collective_strategy.collectives.handles import CompletedHandle, Handle
from collective_strategy.gradients.bucket import Bucket


class ListedBucket(Bucket):
    """The gradients of one route and dtype; nothing is packed.

    Packing costs such a backend more time to compile than it saves on the way. The reductions are started together,
    and a backend that compiles makes those of one group one operation when the first is waited for.
    """

    outlives_step = False

    @staticmethod
    def _cut(nbytes: list[int], moved: int) -> list[range]:
        return []  # nothing is moved before all are there

    def abandon(self) -> None:
        """Nothing was taken out of ``.grad`` yet."""

    def fill(self) -> list[int]:
        found = []
        self._gradients = [None] * len(self.members)
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue  # a sparse gradient stays in .grad and goes the other way
            parameter.grad = None  # a gradient that comes after this is a piece of its own
            self._gradients[place] = gradient.detach()
            found.append(self.members[place])
        return found

    def send(self) -> None:
        self._sent = [
            torch.zeros_like(parameter, dtype=self._wire, requires_grad=False)
            if gradient is None
            else gradient.to(self._wire) * self.route.scale
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True)
        ]
        self._gradients = []
        started = [self.group.all_reduce_(tensor, "sum", async_op=True) for tensor in self._sent]
        self._handles = [one if isinstance(one, Handle) else CompletedHandle(one) for one in started]

    def results(self) -> dict[int, Tensor]:
        return dict(zip(self.members, self._sent, strict=True))

    def wait(self) -> dict[int, Tensor]:
        for handle in self._handles:
            handle.wait()
        results = zip(self.members, self._sent, self._parameters, strict=True)
        converted = {i: sent.to(p.dtype) for i, sent, p in results if sent.dtype != p.dtype}
        self._handles, self._sent = [], []
        return converted

    _gradients: list[Tensor | None]
    _sent: list[Tensor]
    _handles: list[Handle]
