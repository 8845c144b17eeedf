"""Trains the same modules under "ddp" and under "collective" and writes their checkpoints: ``like_ddp.py OUT``.

Only the string differs; the tests compare the files. Each run has its own two forked processes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import run_forked

import collective_strategy  # noqa: F401  (the one import)

torch.set_num_threads(1)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))


class Automatic(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class TwoOptimizers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = network(), nn.Linear(2, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(F.cross_entropy(self.b(self.a(x)), y))
        self.clip_gradients(first, gradient_clip_val=0.5)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(F.cross_entropy(self.b(self.a(x).detach()), y))
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.a.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(
            self.b.parameters(), lr=0.01
        )


def data(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.randint(0, 2, (n,), generator=generator))


def trained(strategy: str, model: L.LightningModule, out: Path, epochs: int, ckpt: Path | None = None, **kwargs: Any):
    manual = not model.automatic_optimization
    find_unused = strategy == "ddp" and manual
    t = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_find_unused_parameters_true" if find_unused else strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    t.fit(model, DataLoader(data(80), batch_size=4, shuffle=True), DataLoader(data(16), batch_size=4), ckpt_path=ckpt)
    return t


def train(strategy: str, out: Path, other: Path | None = None) -> None:
    """All of it, or with ``other`` the second half of what another strategy began."""
    # 10 batches per rank and epoch in windows of 3: the last one is incomplete; 5 epochs are 20 steps
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "num_sanity_val_steps": 1}
    if other is None:
        L.seed_everything(3)
        t = trained(strategy, Automatic(), out, 5, **options)
        t.save_checkpoint(out / "automatic.ckpt")
        L.seed_everything(3)
        t = trained(strategy, Automatic(), out, 2, **options)
        t.save_checkpoint(out / "half.ckpt")
        L.seed_everything(4)
        t = trained(strategy, TwoOptimizers(), out, 2)
        t.save_checkpoint(out / "manual.ckpt")
    else:
        # from the other strategy's half-way checkpoint
        L.seed_everything(3)
        t = trained(strategy, Automatic(), out, 5, ckpt=other / "half.ckpt", **options)
        t.save_checkpoint(out / "resumed.ckpt")


def main() -> None:
    out = Path(sys.argv[1])
    places = {name: out / name for name in ("ddp", "collective")}
    for place in places.values():
        place.mkdir()
    run_forked({name: lambda name=name: train(name, places[name]) for name in places}, out, deadline=120)
    results = json.loads((out / "rank0.json").read_text())
    others = {"ddp": places["collective"], "collective": places["ddp"]}
    run_forked(
        {f"{name}-resumed": lambda name=name: train(name, places[name], others[name]) for name in places},
        out,
        deadline=120,
    )
    results |= json.loads((out / "rank0.json").read_text())
    for name, result in results.items():
        if result["codes"] != [0, 0]:
            sys.exit(f"{name}: {result['codes']}\n{result['log']}")


if __name__ == "__main__":
    main()
