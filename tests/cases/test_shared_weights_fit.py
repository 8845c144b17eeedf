"""Shared weights under the Trainer on a 2 x 2 mesh: start values, buffers at validation, tied weights, clipping."""

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy, sharded, shared
from collective_strategy.testing import run_ranks


class Model(L.LightningModule):
    """Every rank draws its own start values. The data are one sample, the steps three."""

    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ["RANK"])
        torch.manual_seed(rank)
        self.common = shared(nn.Linear(2, 2), over="model")
        self.piece = sharded(nn.Linear(2, 2, bias=False), "weight", over="model", dim=0)
        self.embedding = shared(nn.Embedding(3, 2), over="model")
        self.output = shared(nn.Linear(2, 3, bias=False), over="model")
        self.output.weight = self.embedding.weight
        self.statistics = nn.Module()
        self.statistics.register_buffer("k", torch.tensor(float(rank % 2)))
        self.everybody = shared(nn.Module(), over="model")
        self.everybody.register_buffer("k", torch.tensor(5.0 + rank))
        self.drawn = self.piece.weight.detach().clone(), self.common.weight.detach().clone()
        self.seen: dict[str, Any] = {}

    def on_train_start(self) -> None:
        self.seen["start"] = self.piece.weight.detach().clone(), self.common.weight.detach().clone()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rank = self.collective.rank
        hidden = self.common(self.embedding(torch.tensor([rank % 3])))
        return 30 * (self.piece(hidden).square().sum() + self.output(hidden).square().sum())

    def on_train_epoch_end(self) -> None:
        if self.collective.rank == 3:
            self.statistics.k.fill_(9)

    def on_validation_start(self) -> None:
        self.seen["buffers"] = self.statistics.k.item(), self.everybody.k.item()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=CollectiveStrategy(mesh={"data": 2, "model": 2}, timeout=30),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        **options,
    )


def fit_twice(_: Any, path: str) -> dict[str, Any]:
    data = DataLoader([0.0], batch_size=1)
    model = Model()
    first = trainer(max_epochs=3)
    first.fit(model, data, data)
    # one file per rank, since the pieces differ
    path = f"{path}/rank{os.environ['RANK']}.pt"
    torch.save(model.state_dict(), path)
    again = Model()
    again.load_state_dict(torch.load(path))
    second = trainer(max_epochs=1)
    second.fit(again, data, data)
    result = {"drawn": model.drawn, "buffers": model.seen["buffers"], "start": model.seen["start"]}
    for name, module, fitted in (("first", model, first), ("second", again, second)):
        held = fitted.optimizers[0].param_groups[0]["params"]
        result[name] = {
            "tied": module.output.weight is module.embedding.weight,
            "held": sum(parameter is module.embedding.weight for parameter in held),
            "common": [parameter.detach() for parameter in (*module.common.parameters(), module.embedding.weight)],
            "piece": module.piece.weight.detach(),
            "start": module.seen["start"],
        }
    first.strategy.collective.teardown()
    second.strategy.collective.teardown()
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("weights"))
    outcomes = run_ranks(4, fit_twice, path, backend=None, fresh=True, timeout=60)
    return [outcome.result() for outcome in outcomes]


def test_shared_weights_start_from_rank_0_and_pieces_from_their_first_data_rank(ranks):
    drawn = [rank["drawn"] for rank in ranks]
    for i, rank in enumerate(ranks):
        piece, common = rank["start"]
        assert torch.equal(common, drawn[0][1])
        assert torch.equal(piece, drawn[i % 2][0])
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_buffers_at_validation_are_those_of_the_data_group_unless_marked(ranks):
    assert [rank["buffers"] for rank in ranks] == [(0.0, 5.0), (1.0, 5.0), (0.0, 5.0), (1.0, 5.0)]


@pytest.mark.parametrize("run", ["first", "second"])
def test_tied_weights_stay_tied_and_are_held_once(ranks, run):
    assert [(rank[run]["tied"], rank[run]["held"]) for rank in ranks] == [(True, 1)] * 4


@pytest.mark.parametrize("run", ["first", "second"])
def test_shared_weights_are_bit_equal_after_clipped_steps_and_pieces_over_the_data_axis(ranks, run):
    for i, rank in enumerate(ranks):
        assert all(torch.equal(a, b) for a, b in zip(rank[run]["common"], ranks[0][run]["common"], strict=True))
        assert torch.equal(rank[run]["piece"], ranks[i % 2][run]["piece"])
        assert not torch.equal(rank[run]["common"][0], rank[run]["start"][1])


def test_a_second_fit_starts_from_what_was_saved(ranks):
    for rank in ranks:
        assert torch.equal(rank["second"]["start"][0], rank["first"]["piece"])
        assert torch.equal(rank["second"]["start"][1], rank["first"]["common"][0])
