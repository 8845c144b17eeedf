"""A notebook's process: ranks are forked or spawned, results come back: ``notebook.py OUT METHOD``."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from toys import Toy, loader, trainer

from collective_strategy import CollectiveStrategy


class Logs(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("seen", batch.sum(), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class MakesLayers(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)

    def setup(self, stage: str) -> None:
        self.late = nn.Linear(2, 2)
        self.head = nn.Linear(3, 3)


def main() -> None:
    out, method = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    checkpoints = ModelCheckpoint(tempfile.mkdtemp(), monitor="seen", mode="max")
    model = Logs()
    t = trainer(
        strategy=CollectiveStrategy(start_method=method, timeout=30),
        callbacks=[checkpoints],
        enable_checkpointing=True,
    )
    t.fit(model, loader([1.0, 2.0, 3.0, 4.0]))
    results["w"] = model.w.item()
    results["metric"] = t.callback_metrics["seen"].item()
    results["best"] = Path(checkpoints.best_model_path).exists()
    results["score"] = float(checkpoints.best_model_score)
    results["progress"] = [t.global_step, t.current_epoch]
    if method == "fork":  # spawned ranks import everything each time
        # as in one process: max_epochs is reached, then there is one more
        t.fit(model, loader([1.0, 2.0, 3.0, 4.0]))
        results["again"] = model.w.item()
    t.fit_loop.max_epochs = 2
    t.fit(model, loader([1.0, 2.0, 3.0, 4.0]))
    results["second_epoch"] = [model.w.item(), t.global_step, t.current_epoch]
    late = MakesLayers()
    trainer(strategy=CollectiveStrategy(start_method=method, timeout=30)).fit(late, loader([1.0, 2.0, 3.0, 4.0]))
    results["late"] = late.w.item()
    (out / "rank0.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
