"""Random numbers over a mesh: equal where ranks repeat one computation, different where each has its own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
    random.seed(_mixed(of_python, place))
    if numpy is not None:
        numpy.random.seed(_mixed(of_numpy, place) % 2**32)


@contextmanager
def varying(collective: Collective) -> Iterator[None]:
    """See `Collective.varying_rng`.

    The generators inside are seeded with a number drawn outside and the rank. Nothing else is kept, so that whoever
    puts the outer generator back (activation checkpointing, a resumed run) gets the same numbers inside as well.
    """
    kind = collective.device.type
    module = None if kind == "cpu" else getattr(torch, kind, None)
    device: Any = module if hasattr(module, "get_rng_state") and hasattr(module, "manual_seed") else None
    seed = _mixed(_draw(), collective.rank)
    before = torch.default_generator.get_state()
    before_on_device = None if device is None else device.get_rng_state()
    torch.default_generator.manual_seed(seed)
    if device is not None:
        device.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        if device is not None:
            device.set_rng_state(before_on_device)


def _draw() -> int:
    return int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))


def _mixed(seed: int, rank: int) -> int:
    """A seed for a rank, far from those of other ranks and seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest(), "little") >> 1
