"""Random sequences of backwards, local increments, zeroing, scaling, freezing and reductions, beside bookkeeping.

The bookkeeping holds, for every weight and rank, the reduced part and the local part of its gradient as plain numbers.
"""

import random

import pytest
import torch
from engine_ranks import MESH_2X2, MODEL_2, per_rank
from torch import nn

from collective_strategy import GradientReducer
from collective_strategy.gradients import BucketSizes
from collective_strategy.sharing import shared

KINDS = ("private", "sum", "mean", "none")
ACTIONS = ["sync"] * 6 + ["local"] * 4 + ["two at once", "retained", "drop", "zero", "halve", "toggle", "reduce"]


class Books:
    """Right answers. Ranks count through the model axis first."""

    def __init__(self, kinds: list[str], data: int, model: int) -> None:
        self.kinds, self.data, self.model = kinds, data, model
        self.ranks = range(data * model)
        self.reduced: list[list[float | None]] = [[None for _ in self.ranks] for _ in kinds]
        self.local: list[list[float | None]] = [[None for _ in self.ranks] for _ in kinds]
        self.trainable = [True for _ in kinds]

    def group(self, i: int, rank: int) -> list[int]:
        alone = self.kinds[i] in ("private", "none")
        return [other for other in self.ranks if not alone or other % self.model == rank % self.model]

    def add(self, i: int, rank: int, value: float) -> None:
        self.local[i][rank] = (self.local[i][rank] or 0.0) + value

    def reduce(self) -> None:
        for i, kind in enumerate(self.kinds):
            averaged = self.data * (self.model if kind == "mean" else 1)
            sums = []
            for rank in self.ranks:
                parts = [part for other in self.group(i, rank) if (part := self.local[i][other]) is not None]
                sums.append(sum(parts) / averaged if parts else None)
            for rank, total in enumerate(sums):
                if total is not None:
                    self.reduced[i][rank] = (self.reduced[i][rank] or 0.0) + total
                self.local[i][rank] = None

    def scale(self, factor: float) -> None:
        for table in (self.reduced, self.local):
            table[:] = [[None if value is None else value * factor for value in row] for row in table]

    def drop(self) -> None:
        self.reduced = [[None for _ in self.ranks] for _ in self.kinds]
        self.local = [[None for _ in self.ranks] for _ in self.kinds]

    @property
    def mixed(self) -> bool:
        """Whether a gradient is reduced in part; scaling it in place would mix the parts."""
        pairs = [pair for i in range(len(self.kinds)) for pair in zip(self.reduced[i], self.local[i], strict=True)]
        return any(reduced is not None and local is not None for reduced, local in pairs)

    def expected(self, i: int, rank: int) -> float | None:
        parts = [part for part in (self.reduced[i][rank], self.local[i][rank]) if part is not None]
        return sum(parts) if parts else None


def play(collective, seed: int, data: int, model: int) -> str | None:
    """One game; what went wrong, if anything."""
    dice = random.Random(seed)
    kinds = [dice.choice(KINDS) if model > 1 else "private" for _ in range(dice.randint(2, 6))]
    module = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.zeros((), dtype=torch.float64))]) for _ in kinds])
    for kind, part in zip(kinds, module, strict=True):
        if kind != "private":
            shared(part, over="model", grad=kind)
    reducer = GradientReducer(
        module, collective, sizes=BucketSizes(dice.choice([1, 10**6]), dice.choice([8, 10**6]), 8)
    )
    books, weights = Books(kinds, data, model), list(module.parameters())

    def backward(action: str) -> None:
        factors = [[dice.randint(-5, 5) if dice.random() < 0.7 else None for _ in kinds] for _ in books.ranks]
        orders = [dice.sample(range(len(kinds)), len(kinds)) for _ in books.ranks]
        terms = [weights[i] * f for i in orders[collective.rank] if (f := factors[collective.rank][i]) is not None]
        loss = sum(term for term in terms if term.requires_grad)
        times = 2 if action in ("two at once", "retained") else 1
        with reducer.backward(sync=action != "local"):
            for time in range(times):
                if torch.is_tensor(loss):
                    loss.backward(retain_graph=time < times - 1)
        for rank, row in enumerate(factors):
            for i, factor in enumerate(row):
                if factor is not None and books.trainable[i]:
                    books.add(i, rank, float(times * factor))
        if action != "local":
            books.reduce()

    done = []
    for _ in range(dice.randint(5, 20)):
        action = dice.choice(ACTIONS)
        if action == "halve" and books.mixed:
            continue
        done.append(action)
        if action == "drop":
            module.zero_grad()
            books.drop()
        elif action in ("zero", "halve"):
            for gradient in (w.grad for w in weights if w.grad is not None):
                gradient.mul_(0.5 if action == "halve" else 0.0)
            books.scale(0.5 if action == "halve" else 0.0)
        elif action == "toggle":
            books.trainable = [dice.random() < 0.6 for _ in kinds]
            for weight, trainable in zip(weights, books.trainable, strict=True):
                weight.requires_grad_(trainable)
        elif action == "reduce":
            reducer.reduce_gradients()
            books.reduce()
        else:
            backward(action)
        for i, weight in enumerate(weights):
            right = books.expected(i, collective.rank)
            found = None if weight.grad is None else weight.grad.item()
            if (right is None) != (found is None) or abs((right or 0.0) - (found or 0.0)) > 1e-9:
                reducer.close()
                return f"seed {seed}, {kinds[i]} weight {i} after {done}: {found}, not {right}"
    reducer.close()
    return None


@pytest.mark.parametrize(
    ("mesh", "data", "model"),
    [(None, 2, 1), (MODEL_2, 1, 2), (MESH_2X2, 2, 2)],
    ids=["data 2", "model 2", "data 2 x model 2"],
)
def test_random_sequences(mesh, data, model):
    def games(collective):
        for seed in range(40):
            wrong = play(collective, seed, data, model)
            if collective.any(wrong is not None):
                return wrong
        return None

    assert per_rank(data * model, games, mesh=mesh, timeout=200) == [None] * (data * model)
