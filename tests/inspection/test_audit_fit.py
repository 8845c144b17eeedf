"""The audit under the Trainer: wrong marks end the run by name, right ones train as if nobody had looked."""

import logging
import os
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from collective_strategy import AuditSharing, CollectiveStrategy, private, shared
from collective_strategy.inspection import SharingMistakeError
from collective_strategy.testing import run_ranks


class Model(L.LightningModule):
    """Each model rank sees its half of a sample. Changes a lot in its step, and logs."""

    def __init__(self, mark: str = "sum", manual: bool = False, forgotten: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = shared(nn.Linear(2, 3), over="model", grad=mark)
        self.norm = private(nn.BatchNorm1d(3))
        if forgotten:
            self.late = nn.LayerNorm(3)
        torch.manual_seed(1 + int(os.environ["RANK"]) % 2)
        self.head = private(nn.Linear(3, 1))
        self.metric = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.automatic_optimization = not manual

    def forward(self, x: Tensor) -> Tensor:
        own = x[:, self.collective["model"].rank]
        hidden = self.norm(self.encoder(own))
        hidden = self.late(hidden) if hasattr(self, "late") else hidden
        return self.head(nn.functional.dropout(hidden, 0.25))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        batch.mul_(1.5)
        loss = self(batch).square().mean()
        self.metric.update(loss.detach())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True)
        if self.automatic_optimization:
            return {"loss": loss}
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self(batch).square().mean())
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(model: Model, *callbacks: Any, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CollectiveStrategy(mesh={"data": 1, "model": 2}, timeout=30),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=1,
        callbacks=list(callbacks),
        **options,
    )
    torch.manual_seed(5)
    data = torch.randn(24, 2, 2, generator=torch.Generator().manual_seed(7))
    trainer.fit(model, DataLoader(data, batch_size=4))
    return trainer


def trained(model: Model, *callbacks: Any, **options: Any) -> Any:
    trainer = fit(model, *callbacks, **options)
    return (
        {name: value.tolist() for name, value in model.state_dict().items()},
        model.losses,
        model.metric.compute().item(),
        trainer.global_step,
        trainer.callback_metrics.get("loss"),
        trainer.optimizers[0].param_groups[0]["lr"],
        torch.rand(2).tolist(),
    )


def scenario(_: Any) -> dict[str, Any]:
    options = {"automatic": {"accumulate_grad_batches": 2}, "manual": {}, "half": {"precision": "bf16-mixed"}}
    seen: dict[str, Any] = {}
    for name, settings in options.items():
        pair = [trained(Model(manual=name == "manual"), *c, **settings) for c in ([], [AuditSharing()])]
        seen[name] = repr(pair[0]) == repr(pair[1])
    reports = []
    logged = logging.Handler()
    logged.emit = lambda record: record.levelno == logging.WARNING and messages.append(record.getMessage())
    logging.getLogger("collective_strategy").addHandler(logged)
    messages: list[str] = []
    for model in (Model(forgotten=True), Model(mark="mean")):

        class Looking(L.Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 3:
                    loader = torch.randn(2, 4, 2, 2, generator=torch.Generator().manual_seed(9))
                    report = trainer.strategy.audit(list(loader))
                    reports.append([(f.kind, f.name) for f in report.mistakes + report.questions])

        fit(model, Looking(), AuditSharing())
    seen["reports"], seen["logged"] = reports, [text for text in messages if text.startswith("Audit of")]
    with pytest.raises(SharingMistakeError) as raised:
        fit(Model(mark="none"), AuditSharing())
    seen["error"] = str(raised.value)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [outcome.result() for outcome in run_ranks(2, scenario, backend=None, fresh=True, timeout=60)]


@pytest.mark.parametrize("kind", ["automatic", "manual", "half"])
def test_training_goes_on_as_if_nobody_had_looked(ranks, kind):
    assert [rank[kind] for rank in ranks] == [True, True]


def test_wrong_marks_end_the_run_on_all_ranks_by_name(ranks):
    text = ranks[0]["error"]
    assert text == ranks[1]["error"]
    assert text.startswith("Audit of 6 weights over model in 2 batches: 2 mistakes.")
    assert "marked grad='none' over model, but the 2 ranks get different gradients, so that copies drift apart:" in text
    assert "    encoder.weight (by up to" in text
    assert "    encoder.bias (by up to" in text


def test_questions_are_a_warning_on_rank_0(ranks):
    first, second = ranks[0]["logged"]
    assert "no mark for axis model, equal on the 2 ranks, but different gradients" in first
    assert "    late.weight (by up to" in first
    assert "marked grad='mean' over model, but the 2 ranks get different gradients" in second
    assert ranks[1]["logged"] == []


def test_an_audit_in_any_hook(ranks):
    drifted, mean = ranks[0]["reports"]
    assert drifted == []  # the forgotten norm has drifted apart by then, and looks like a private one
    assert sorted(mean) == [("averaged parts", "encoder.bias"), ("averaged parts", "encoder.weight")]


def test_wrong_numbers():
    for wrong in (1, True, 2.0):
        with pytest.raises(ValueError, match="AuditSharing needs two batches at least"):
            AuditSharing(wrong)
    with pytest.raises(ValueError, match="audit needs two batches at least, not 1"):
        CollectiveStrategy().audit([0])
