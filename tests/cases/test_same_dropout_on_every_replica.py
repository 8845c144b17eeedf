"""Dropout masks and augmentations: another one for each part of the batch, the same within a model group."""

import random
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from collective_strategy import CollectiveStrategy
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}


class Augmented(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), random.random(), torch.rand(1).item()])


class Masked(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.masks: list[Any] = []
        self.own: list[Any] = []
        self.samples: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.masks.append(nn.functional.dropout(torch.ones(64)).tolist())
        if self.collective.mesh is not None:
            with self.collective["model"].varying_rng():
                self.own.append(nn.functional.dropout(torch.ones(64)).tolist())
        self.samples.append(batch.tolist())
        return self.layer(batch).sum()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.masks.append(nn.functional.dropout(torch.ones(64)).tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(workers: int = 0, test: bool = False, **settings: Any) -> Masked:
    L.seed_everything(0, workers=True, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=CollectiveStrategy(timeout=30, **settings),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Masked()
    data = DataLoader(Augmented(), batch_size=1, shuffle=not test, num_workers=workers)
    trainer.test(model, data, verbose=False) if test else trainer.fit(model, data)
    trainer.strategy.collective.teardown()
    return model


def scenario(_: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, settings in {
        "mesh": {"mesh": MESH},
        "again": {"mesh": MESH},
        "workers": {"mesh": MESH, "workers": 1},
        "test": {"mesh": MESH, "test": True},
        "no mesh": {},
        "no mesh, asked for": {"random_numbers": "by_data_rank"},
        "mesh, as they are": {"mesh": MESH, "random_numbers": "as_they_are"},
    }.items():
        model = run(**settings)
        seen[name] = {"masks": model.masks, "own": model.own, "samples": model.samples}
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [outcome.result() for outcome in run_ranks(4, scenario, backend=None, fresh=True, timeout=100)]


def pattern(ranks, name, what):
    """Which ranks have the same: the first rank with each one's value."""
    values = [rank[name][what] for rank in ranks]
    assert all(values)
    return [values.index(value) for value in values]


def test_masks_agree_inside_a_model_group_and_differ_between_data_ranks(ranks):
    assert pattern(ranks, "mesh", "masks") == [0, 0, 2, 2]
    first = ranks[0]["mesh"]["masks"]
    assert first[0] != first[1]


def test_pieces_have_their_own_masks_in_varying_rng(ranks):
    assert pattern(ranks, "mesh", "own") == [0, 1, 2, 3]


def test_a_second_run_gives_the_same_masks(ranks):
    assert all(rank["mesh"] == rank["again"] for rank in ranks)


def test_evaluation_draws_by_data_rank_too(ranks):
    assert pattern(ranks, "test", "masks") == [0, 0, 2, 2]


@pytest.mark.parametrize("name", ["mesh", "workers"])
def test_model_ranks_get_the_same_augmentations_of_the_same_samples(ranks, name):
    assert pattern(ranks, name, "samples") == [0, 0, 2, 2]
    indices = [[batch[0][0] for batch in rank[name]["samples"]] for rank in ranks]
    assert sorted(indices[0] + indices[2]) == [float(i) for i in range(8)]
    augmentations = [{batch[0][k] for batch in rank[name]["samples"]} for rank in ranks for k in (1, 2)]
    assert not augmentations[0] & augmentations[4]
    assert not augmentations[1] & augmentations[5]


def test_without_a_mesh_numbers_are_as_with_ddp_unless_asked_for(ranks):
    assert pattern(ranks, "no mesh", "masks") == [0, 0, 0, 0]
    assert pattern(ranks, "no mesh, asked for", "masks") == [0, 1, 2, 3]
    assert pattern(ranks, "mesh, as they are", "masks") == [0, 0, 0, 0]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="random_numbers='always' is none of 'auto', 'by_data_rank', 'as_they_are'"):
        CollectiveStrategy(random_numbers="always")
    with pytest.raises(ValueError, match="buffers='sum' is none of 'first', 'first_each_step', 'mean', 'own'"):
        CollectiveStrategy(buffers="sum")
