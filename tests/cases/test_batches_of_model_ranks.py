"""Ranks that hold one model together and get different data: named, or made equal."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from collective_strategy import CollectiveStrategy, shared
from collective_strategy.strategies.batches import fingerprint
from collective_strategy.testing import run_ranks

# the first test of a module waits for the runs that all of them look at
pytestmark = pytest.mark.timeout(240)

MESH = {"data": 2, "model": 2}


class Sees(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = shared(nn.Linear(1, 1), over="model", grad="none")
        self.seen: dict[str, list[float]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["train"] += batch["x"].flatten().tolist()
        return self.layer(batch["x"]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["val"] += batch["x"].flatten().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Numbers(Dataset):
    """Sample i is i, plus what ``disturb`` adds on this rank."""

    def __init__(self, disturb: Any = lambda: 0.0, n: int = 8) -> None:
        self.disturb, self.n = disturb, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.tensor([i + self.disturb()]), "name": "sample"}


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter({"x": torch.tensor([float(i)])} for i in range(self.n))


def fit(train: Any, val: Any = None, batches: str = "check", **options: Any) -> dict[str, Any]:
    """What this rank saw, or its error."""
    module = Sees()
    fitted = L.Trainer(
        accelerator="cpu",
        devices=4,
        # else the strategy would seed the ranks of a model group alike
        strategy=CollectiveStrategy(mesh=MESH, timeout=30, batches=batches, random_numbers="as_they_are"),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    error = ""
    try:
        fitted.fit(module, train, val)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    fitted.strategy.collective.teardown()
    return {**module.seen, "error": error}


def scenarios(_: Any) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    import os

    rank = int(os.environ["RANK"])
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)  # nobody has seeded alike
    whole = DataLoader(Numbers(), batch_size=2)
    weights = [1.0] * 8
    return {
        "alike": fit(DataLoader(Numbers(), batch_size=2, shuffle=True), whole),
        "by rank": fit(DataLoader(Numbers(lambda: float(rank % 2) / 2), batch_size=2)),
        "augmented": fit(DataLoader(Numbers(random.random), batch_size=2)),
        "validation": fit(whole, DataLoader(Numbers(lambda: float(rank == 3)), batch_size=2)),
        "broadcast": fit(
            DataLoader(Numbers(random.random), batch_size=2), DataLoader(Numbers(random.random)), "broadcast"
        ),
        "different": fit(DataLoader(Numbers(lambda: float(rank % 2) / 2), batch_size=2), batches="different"),
        "own samplers": fit(
            DataLoader(Numbers(), batch_size=2, sampler=WeightedRandomSampler(weights, 8)),
            DataLoader(Numbers(), batch_size=2, sampler=RandomSampler(range(8), num_samples=8, replacement=True)),
        ),
        "one rank has less": fit(DataLoader(Numbers(n=8 - 2 * rank), batch_size=1), use_distributed_sampler=False),
        "stream": fit(DataLoader(Stream(4 - (rank == 3)))),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    outcomes = run_ranks(4, scenarios, backend=None, fresh=True, timeout=150)
    return [outcome.result() for outcome in outcomes]


def test_model_ranks_get_one_list_and_data_ranks_disjoint_ones_shuffled_too(ranks: Any) -> None:
    """Ranks 0 and 1 are one model, 2 and 3 the other; in both epochs the union is all."""
    seen = [rank["alike"]["train"] for rank in ranks]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(seen[0][epoch] + seen[2][epoch]) == [float(i) for i in range(8)]
    assert seen[0][:4] != seen[0][4:]
    assert [rank["alike"]["error"] for rank in ranks] == [""] * 4


@pytest.mark.parametrize("name", ["by rank", "augmented"])
def test_a_difference_is_refused_on_all_ranks_with_names(ranks: Any, name: str) -> None:
    errors = {rank[name]["error"] for rank in ranks}
    assert len(errors) == 1
    error = errors.pop()
    assert "The ranks [0, 1] hold one model together, but got different batches: in train batch 0, batch['x']" in error
    assert "a tensor [2, 1] of float32" in error
    assert "on rank 0 and" in error
    assert "batches='broadcast'" in error
    assert [rank[name]["train"] for rank in ranks] == [[]] * 4  # before any step


def test_a_difference_in_validation_only_is_found_too(ranks: Any) -> None:
    for rank in ranks:
        assert "The ranks [2, 3] hold one model together" in rank["validation"]["error"]
        assert "in val batch 0" in rank["validation"]["error"]


def test_the_first_model_rank_can_send_its_batches(ranks: Any) -> None:
    for stage in ("train", "val"):
        seen = [rank["broadcast"][stage] for rank in ranks]
        assert seen[0] == seen[1]
        assert seen[2] == seen[3]
        assert seen[0] != seen[2]
    assert any(x % 1 for x in ranks[0]["broadcast"]["train"])
    assert [rank["broadcast"]["error"] for rank in ranks] == [""] * 4


def test_different_batches_can_be_had_on_purpose(ranks: Any) -> None:
    first, second = (ranks[k]["different"] for k in (0, 1))
    assert not first["error"]
    assert [x + 0.5 for x in first["train"]] == second["train"]


def test_a_users_random_sampler_gives_all_model_ranks_one_order(ranks: Any) -> None:
    """Each process draws other numbers; the order is rank 0's, dealt out over the data axis."""
    for stage in ("train", "val"):
        seen = [rank["own samplers"][stage] for rank in ranks]
        assert seen[0] == seen[1]
        assert seen[2] == seen[3]
        assert seen[0] != seen[2]


def test_uneven_numbers_of_batches_inside_a_model_group_are_refused_by_rank(ranks: Any) -> None:
    for rank in ranks:
        assert "the ranks have 8 on rank 0, 6 on rank 1, 4 on rank 2, 2 on rank 3" in rank["one rank has less"]["error"]
        error = rank["stream"]["error"]
        assert "after 3 batches the training data of rank(s) 3 ended while rank(s) 0, 1, 2 had more" in error


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="batches='equal' is none of"):
        CollectiveStrategy(mesh=MESH, batches="equal")


def test_what_a_fingerprint_tells_apart(tmp_path: Path) -> None:
    x = torch.arange(4.0).reshape(2, 2)
    batch = {"x": [x, 3], "y": (None, "text"), "z": np.arange(3)}
    same = {"x": [x.clone().t().contiguous().t(), 3], "y": (None, "text"), "z": np.arange(3)}
    assert fingerprint(batch) == fingerprint(same)
    for other in (
        {**batch, "x": [x.t(), 3]},
        {**batch, "x": [x.double(), 3]},
        {**batch, "x": [x, 3.0]},
        {**batch, "y": (None, "texts")},
        {**batch, "z": np.arange(3) + 1},
        {"x": batch["x"]},
    ):
        assert fingerprint(batch) != fingerprint(other)
    assert fingerprint(torch.tensor(float("nan"))) == fingerprint(torch.tensor(float("nan")))
