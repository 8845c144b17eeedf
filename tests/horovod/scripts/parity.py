"""Trains with torch.distributed and with Horovod in the same processes: ``parity.py OUT N [CASE ...]``.

Nothing but the Trainer's argument differs. Started by any launcher, or by itself. Each rank writes the largest
difference of each case, and what the ranks logged, as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from collective_strategy import CollectiveStrategy, SharedModule

torch.set_num_threads(1)
MESH = {"data": 2, "model": 2}


class Automatic(L.LightningModule):
    """Batch norm and dropout; another start on every rank, which set-up makes equal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.mean = MeanMetric()
        torch.manual_seed(7)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.mean(F.cross_entropy(self.net(x), y))
        self.log("metric", self.mean)
        self.log("rows", self.collective.all_reduce(float(len(x))).item(), on_epoch=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class TwoOptimizers(L.LightningModule):
    """Each toggled in turn, the first one's gradients clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        for optimizer, detach in ((first, False), (second, True)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            hidden = self.a(x)
            self.manual_backward(F.cross_entropy(self.b(hidden.detach() if detach else hidden), y))
            if not detach:
                self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.a.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(self.b.parameters(), 0.01)


class SharedWeights(L.LightningModule):
    """Two model ranks share one layer, hold their own part of another, and exchange what they computed."""

    def configure_model(self) -> None:
        torch.manual_seed(5)
        self.encoder = SharedModule(nn.Linear(4, 6), over="model")
        torch.manual_seed(11 + self.collective["model"].rank)
        self.head = nn.Linear(3, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        model = self.collective["model"]
        mine = self.encoder(x).chunk(2, 1)[model.rank]
        both = model.all_reduce(self.head(torch.relu(mine)), to="invariant")
        return F.cross_entropy(both, y) / 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def data(rows: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 2, (rows,), generator=generator))


def fit(
    backend: str, module: type[L.LightningModule], n: int, precision: str, ckpt: Path | None = None, **options: Any
):
    L.seed_everything(1, verbose=False)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    mesh = MESH if module is SharedWeights else None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=n,
        strategy=CollectiveStrategy(backend, mesh=mesh, timeout=60),
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )
    model = module()
    validation = {"val_dataloaders": DataLoader(data(20, dtype), batch_size=4)} if module is Automatic else {}
    trainer.fit(model, DataLoader(data(80, dtype), batch_size=4, shuffle=True), ckpt_path=ckpt, **validation)
    return trainer, model


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for _, value in sorted(model.state_dict().items()) if value.is_floating_point()]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    out, n, wanted = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    window = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    cases: dict[str, Any] = {
        "accumulated and clipped": (Automatic, window),
        "two optimizers": (TwoOptimizers, {}),
    }
    if n == 4:
        cases["shared weights"] = (SharedWeights, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2})
    result: dict[str, Any] = {}
    for name, (module, options) in cases.items():
        if wanted and name not in wanted:
            continue
        for precision in ("64-true", "32-true"):
            trained = {b: fit(b, module, n, precision, **options) for b in ("torch", "horovod")}
            models = [weights(model) for _, model in trained.values()]
            key = f"{name}, {precision}"
            result[key] = difference(*models)
            result[f"{key}, moved"] = difference(models[0], weights(module())) if module is not SharedWeights else 1.0
            result[f"{key}, logged"] = [
                {k: float(v) for k, v in t.callback_metrics.items()} for t, _ in trained.values()
            ]
            result[f"{key}, lr"] = trained["horovod"][0].optimizers[0].param_groups[0]["lr"]
    if not wanted or "resumed" in wanted:
        result["resumed"] = resumed_difference(out, n, window)
    rank = trained["horovod"][0].global_rank
    (out / f"rank{rank}.json").write_text(json.dumps({"parity": {"value": result}}))


def resumed_difference(out: Path, n: int, window: dict[str, Any]) -> float:
    """The second half of a training under Horovod, the first under torch.distributed."""
    half, _ = fit("torch", Automatic, n, "64-true", max_epochs=1, **window)
    half.save_checkpoint(out / "half.ckpt")
    _, resumed = fit("horovod", Automatic, n, "64-true", ckpt=out / "half.ckpt", **window)
    _, whole = fit("torch", Automatic, n, "64-true", ckpt=out / "half.ckpt", **window)
    return difference(weights(resumed), weights(whole))


if __name__ == "__main__":
    main()
