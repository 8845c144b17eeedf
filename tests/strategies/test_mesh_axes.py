"""A mesh of 2 data x 2 model ranks under the Trainer: what concerns the data axis, and what the world."""

import os
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from collective_strategy import CollectiveStrategy
from collective_strategy.testing import run_ranks


class Meshed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ["RANK"])
        # private to its model rank, equal over the data ranks after set-up
        self.w = nn.Parameter(torch.tensor(float(rank)))
        self.register_buffer("k", torch.tensor(float(rank)))
        self.seen: list[float] = []
        self.start: list[float] = []
        self.validated: list[float] = []

    def on_train_start(self) -> None:
        self.start = [self.w.item(), self.k.item()]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += batch[0].tolist()
        self.log("x", batch[0].mean(), sync_dist=True, on_step=False, on_epoch=True)
        return (self.w * batch[0]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated += batch[0].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _fit(_: Any) -> dict[str, Any]:
    data = DataLoader(TensorDataset(torch.tensor([1.0, 2.0, 3.0, 4.0])), batch_size=1)
    model = Meshed()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=CollectiveStrategy(mesh={"data": 2, "model": 2}, timeout=30),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, data)
    s = trainer.strategy
    result = {
        "start": model.start,
        "seen": model.seen,
        "validated": model.validated[-2:],
        "w": model.w.item(),
        "logged": trainer.callback_metrics["x"].item(),
        "kwargs": s.distributed_sampler_kwargs,
        "gather": s.all_gather(torch.tensor(s.global_rank)).tolist(),
        "model": s.all_gather(torch.tensor(s.global_rank), group="model").tolist(),
        "axis": s.reduce(torch.tensor(1.0 + s.global_rank), group=s.collective["model"], reduce_op="sum").item(),
        "all": s.reduce_boolean_decision(True, all=True),
        "any": s.reduce_boolean_decision(s.global_rank == 3, all=False),
        "object": s.broadcast(s.global_rank, src=2),
    }
    s.collective.teardown()
    return result


def test_data_axis_and_world() -> None:
    """Ranks 0 and 2 are one data column, 1 and 3 the other; 0 and 1 are one model row, 2 and 3 the other."""
    results = [outcome.result() for outcome in run_ranks(4, _fit, backend=None, fresh=True, timeout=60)]
    assert [r["start"] for r in results] == [[0.0, 0.0], [1.0, 1.0]] * 2
    assert results[0]["seen"] == results[1]["seen"]
    assert results[2]["seen"] == results[3]["seen"]
    assert sorted(results[0]["seen"] + results[2]["seen"]) == [1.0, 2.0, 3.0, 4.0]
    assert [r["w"] for r in results] == [-5.0, -4.0] * 2  # minus the sum over steps of the mean over data ranks
    assert [r["logged"] for r in results] == [2.5] * 4
    assert [r["validated"] for r in results] == [[1.0, 3.0], [1.0, 3.0], [2.0, 4.0], [2.0, 4.0]]
    assert [r["kwargs"]["rank"] for r in results] == [0, 0, 1, 1]
    assert [r["gather"] for r in results] == [[0, 2], [1, 3]] * 2
    assert [r["model"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["axis"] for r in results] == [3.0, 3.0, 7.0, 7.0]
    assert all(r["all"] is True and r["any"] is True and r["object"] == 2 for r in results)
