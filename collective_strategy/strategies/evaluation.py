"""Who evaluates which samples: every sample once, and equally many batches on every rank.

Torch only. A *step* is what one batch index means on all ranks together; a *piece* is one rank's share of it, given
as positions ``[start, stop)`` in the common order of the samples.
"""

from collections.abc import Iterable, Iterator, Sized
from itertools import pairwise
from typing import Any

import torch

from collective_strategy.collectives.collective import Collective

Piece = tuple[int, int]


def even_steps(samples: int, batch_size: int, ranks: int) -> list[list[Piece]] | None:
    """Cuts ``samples`` positions into steps of one non-empty piece per rank, none larger than ``batch_size``.

    All steps but the last one or two are full. What is left over is split into near-equal pieces; when it is less
    than one sample per rank, the last full step is split again together with it. So 101 samples in batches of 10 on 2
    ranks are 4 full steps and two steps of (6, 5) and (5, 5).

    Returns:
        Steps x ranks, or None where it cannot be: fewer samples than ranks, or single-sample batches that leave a rest.
    """
    step = ranks * batch_size
    full, rest = divmod(samples, step)
    steps = [_split(k * step, step, ranks) for k in range(full)]
    if rest >= ranks:
        steps.append(_split(full * step, rest, ranks))
    elif rest and full and batch_size > 1:
        pieces = _split((full - 1) * step, step + rest, 2 * ranks)
        steps[-1:] = [pieces[:ranks], pieces[ranks:]]
    elif rest:
        return None
    return steps


def repeated_steps(samples: int, ranks: int) -> list[list[Piece]]:
    """Single-sample pieces where :func:`even_steps` cannot be; the last step repeats samples from the start."""
    positions = list(range(samples)) + [i % samples for i in range(-samples % ranks)]
    return [[(i, i + 1) for i in positions[k : k + ranks]] for k in range(0, len(positions), ranks)]


def uneven_steps(samples: int, ranks: int) -> list[list[Piece]]:
    """Single-sample pieces, each sample once; the last step has no piece for some ranks."""
    return [[(i, i + 1) for i in range(k, min(k + ranks, samples))] for k in range(0, samples, ranks)]


def _split(start: int, amount: int, pieces: int) -> list[Piece]:
    size, larger = divmod(amount, pieces)
    bounds = [start + i * size + min(i, larger) for i in range(pieces + 1)]
    return list(pairwise(bounds))


class SharedPermutation:
    """A new order each epoch, the same on every rank without communication."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self) -> int:
        return self.length


class AgreedOrder:
    """A user's sampler whose order is rank 0's on every rank.

    Samplers draw from each process' own random numbers, so equal orders cannot be assumed. Iterating is collective.
    """

    def __init__(self, sampler: Iterable[Any], collective: Collective) -> None:
        self.sampler, self._collective = sampler, collective

    def set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._collective.broadcast_object(list(self.sampler), src=0))

    def __len__(self) -> int:
        assert isinstance(self.sampler, Sized)
        return len(self.sampler)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AgreedOrder":
        return self


class EvaluationBatchSampler:
    """One rank's batches of an evaluation.

    Args:
        sampler: the common order of all samples; has a length.
        batch_size: the user's; no batch is larger.
        drop_last: as in one process: the samples that do not fill a batch of ``batch_size`` are left out, whatever
            the number of ranks.
        rank, ranks: this process' place on the data axis.
        each_once: where an even split cannot be, rather give some ranks fewer batches than repeat samples.
    """

    def __init__(
        self, sampler: Any, batch_size: int, drop_last: bool, *, rank: int, ranks: int, each_once: bool = False
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self._rank, self._ranks, self._each_once = rank, ranks, each_once

    @property
    def samples(self) -> int:
        """How many samples all ranks evaluate together."""
        return self._used(len(self.sampler))

    @property
    def is_even(self) -> bool:
        return even_steps(self.samples, self.batch_size, self._ranks) is not None

    def _used(self, length: int) -> int:
        return length - length % self.batch_size if self.drop_last else length

    def _pieces(self, samples: int) -> list[Piece]:
        steps = even_steps(samples, self.batch_size, self._ranks)
        if steps is None:
            once = self._each_once and samples >= self._ranks
            steps = uneven_steps(samples, self._ranks) if once else repeated_steps(samples, self._ranks)
        return [step[self._rank] for step in steps if self._rank < len(step)]

    def __iter__(self) -> Iterator[list[Any]]:
        order = list(self.sampler)
        for start, stop in self._pieces(self._used(len(order))):
            yield order[start:stop]

    def __len__(self) -> int:
        return len(self._pieces(self.samples))


class DealtBatchSampler:
    """One rank's batches of a user's own batch sampler: whole batches in turn, the last ones split.

    Batches that do not go round are joined and split into near-equal pieces (together with the round before, when
    there is less than a sample per rank), so each sample comes once and every rank has equally many batches.
    """

    def __init__(self, batches: AgreedOrder, *, rank: int, ranks: int) -> None:
        self.batches = batches
        self._rank, self._ranks = rank, ranks

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    @property
    def sampler(self) -> AgreedOrder:
        """Lightning announces the epoch to a batch sampler's sampler."""
        return self.batches

    def __iter__(self) -> Iterator[list[Any]]:
        batches = [list(batch) for batch in self.batches]
        rest = len(batches) % self._ranks
        whole = len(batches) - rest
        if rest and sum(map(len, batches[whole:])) < self._ranks and whole:
            whole -= self._ranks
        for k in range(self._rank, whole, self._ranks):
            yield batches[k]
        left = [index for batch in batches[whole:] for index in batch]
        if left:
            steps = len(self) - whole // self._ranks
            if len(left) < steps * self._ranks:
                left += [left[i % len(left)] for i in range(steps * self._ranks - len(left))]
            pieces = _split(0, len(left), steps * self._ranks)
            for start, stop in pieces[self._rank :: self._ranks]:
                yield left[start:stop]

    def __len__(self) -> int:
        return -(-len(self.batches) // self._ranks)
