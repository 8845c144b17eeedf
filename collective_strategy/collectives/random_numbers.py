"""Random numbers over a mesh: equal where ranks repeat one computation, different where each has its own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives.collective import Collective


def seed_ranks(collective: Collective, seed: int | None = None) -> None:
    """Seeds torch (all devices), Python and numpy: different over the data axis, equal over all other axes.

    So dropout is another one for each part of the batch, and the same on the ranks that hold one model together and
    repeat a computation. Where these should differ, see `Collective.varying_rng`. Workers of data loaders, which are
    seeded from torch's generator, follow. Called by all ranks; under the Trainer the strategy does it.

    Args:
        collective: All ranks, with their mesh.
        seed: The same on all ranks. Drawn by the first rank from each of the generators if not given.

    Example:
        >>> seed_ranks(collective, 0)
    """
    numpy: Any = sys.modules.get("numpy")
    if seed is None:
        drawn = (_draw(), random.getrandbits(62), int(numpy.random.randint(2**31)) if numpy is not None else 0)
        of_torch, of_python, of_numpy = collective.broadcast_object(drawn)
    else:
        of_torch = of_python = of_numpy = seed
    place = collective.data.rank
    torch.manual_seed(_mixed(of_torch, place))
    for generator in collective._generators():
        generator.seed(_mixed(of_torch, place))
    random.seed(_mixed(of_python, place))
    if numpy is not None:
        numpy.random.seed(_mixed(of_numpy, place) % 2**32)


@contextmanager
def varying(collective: Collective) -> Iterator[None]:
    """See `Collective.varying_rng`.

    The generators inside are seeded with a number drawn outside and the rank. Nothing else is kept, so that whoever
    puts the outer generator back (activation checkpointing, a resumed run) gets the same numbers inside as well.
    """
    generators = collective._generators()
    seed = _mixed(generators[0].draw(), collective.rank)
    before = [generator.state() for generator in generators]
    for generator in generators:
        generator.seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.restore(state)


class CPUGenerator:
    """Torch's default generator."""

    def draw(self) -> int:
        """A number, after which the generator goes on."""
        return _draw()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def state(self) -> Tensor:
        return torch.default_generator.get_state()

    def restore(self, state: Tensor) -> None:
        torch.default_generator.set_state(state)


class DeviceGenerator:
    """That of a device with a module like `torch.cuda`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state

    def restore(self, state: Tensor) -> None:
        self._module.set_rng_state(state)


def _draw() -> int:
    return int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))


def _mixed(seed: int, rank: int) -> int:
    """A seed for a rank, far from those of other ranks and seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest(), "little") >> 1
