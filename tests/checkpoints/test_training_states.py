"""What else a run goes on from: several optimizers, schedulers, the loss scaler, frozen weights, amid an epoch."""

import os
import random
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy, private, sharded, shared
from collective_strategy.checkpoints import is_checkpoint
from collective_strategy.testing import run_ranks

# the first test of a module waits for the runs that all of them look at
pytestmark = pytest.mark.timeout(240)

MESH = {"data": 2, "model": 2}


class Adversaries(L.LightningModule):
    """Two networks that take turns, of shared, cut and private weights; one frozen weight; two schedulers."""

    def __init__(self, automatic: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.save_hyperparameters()
        torch.manual_seed(int(os.environ["RANK"]))
        self.common = shared(nn.Linear(2, 2), over="model")
        self.piece = sharded(nn.Linear(2, 3, bias=False), "weight", over="model", dim=0)
        self.other = private(nn.Linear(2, 2))
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.unused = shared(nn.Linear(2, 2), over="model")  # never has a gradient, so no momentum
        self.dropout = nn.Dropout(0.5)
        self.losses: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        h = self.common(self.dropout(x + random.random()))
        return self.piece(h).square().mean() + self.other(h).square().mean() + (h * self.frozen).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch.repeat(1, 2))
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        everybody = self.collective.reduce(loss.detach(), "mean").item()  # one learning rate for all copies
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch.repeat(1, 2)))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            schedule.step(*([everybody] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        return None

    def configure_optimizers(self) -> Any:
        first = [*self.common.parameters(), *self.unused.parameters()]
        if self.automatic_optimization:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
        sgd = torch.optim.SGD(first, lr=0.05, momentum=0.9, nesterov=True)
        adam = torch.optim.Adam([*self.piece.parameters(), *self.other.parameters(), self.frozen], lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=1, factor=0.5)
        return [sgd, adam], [plateau, torch.optim.lr_scheduler.StepLR(adam, 2)]


def fit(module: Adversaries, path: str, steps: int, source: str | None = None, **options: Any) -> L.Trainer:
    saving = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    fitted = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=CollectiveStrategy(mesh=MESH, timeout=40),
        max_steps=steps,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    # every batch is the same, since Lightning starts the data anew amid an epoch
    fitted.fit(module, DataLoader(torch.ones(6, 1), batch_size=1), ckpt_path=source)
    return fitted


def held(module: Adversaries, fitted: L.Trainer) -> dict[str, Any]:
    scaler = getattr(fitted.precision_plugin, "scaler", None)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in fitted.optimizers],
        "schedules": [config.scheduler.state_dict() for config in fitted.lr_scheduler_configs],
        "losses": module.losses,
        "step": fitted.global_step,
        "scaler": None if scaler is None else scaler.state_dict(),
        "drawn": (torch.rand(()).item(), random.random()),
    }


def scenarios(_: Any, directory: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for kind in ("manual", "scaled"):
        for name in ("straight", "resumed"):
            path = f"{directory}/{kind}-{name}"
            steps = 16 if kind == "manual" else 8  # two per batch; in the second epoch
            options: dict[str, Any] = {}
            if kind == "scaled":
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)
                options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
            module = Adversaries(automatic=kind == "scaled")
            random.seed(len(name))
            source = None if name == "straight" else f"{directory}/{kind}-straight/step={steps // 4}.ckpt"
            fitted = fit(module, path, steps, source, **options)
            results[f"{kind} {name}"] = held(module, fitted)
            fitted.strategy.collective.teardown()
        results[f"{kind} directory"] = is_checkpoint(source)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = str(tmp_path_factory.mktemp("states"))
    outcomes = run_ranks(4, scenarios, directory, backend=None, fresh=True, timeout=120)
    return [outcome.result() for outcome in outcomes]


def assert_equal(one: Any, other: Any, place: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for k, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{place}[{k}]")
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), place
    else:
        assert one == other, place


@pytest.mark.parametrize("kind", ["manual", "scaled"])
def test_a_run_resumed_amid_an_epoch_goes_on_exactly(ranks: list[dict[str, Any]], kind: str) -> None:
    """Weights, every optimizer's and schedule's state, the scale, and the losses of the rest."""
    for rank in ranks:
        straight, resumed = rank[f"{kind} straight"], rank[f"{kind} resumed"]
        assert rank[f"{kind} directory"]
        losses = resumed["losses"]
        assert 0 < len(losses) < len(straight["losses"])
        assert losses == straight["losses"][-len(losses) :]
        for key in ("weights", "optimizers", "schedules", "step", "scaler", "drawn"):
            assert_equal(resumed[key], straight[key], key)


def test_the_scale_did_change_and_momenta_are_missing_where_no_gradient_was(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["scaled straight"]["scaler"]["scale"] != 2.0**30
        sgd, adam = rank["manual straight"]["optimizers"]
        assert sorted(sgd["state"]) == [0, 1]  # not the unused layer's
        assert sorted(adam["state"]) == [0, 1, 2]  # not the frozen weight's
    first, second = (ranks[k]["manual straight"]["weights"] for k in (0, 1))
    assert not torch.equal(first["other.weight"], second["other.weight"])
    assert torch.equal(first["common.weight"], second["common.weight"])
