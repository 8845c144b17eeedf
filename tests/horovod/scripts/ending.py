"""A fit that ends badly: ``ending.py OUT HOW RANK [N]``; with 4 ranks there are groups of two beside the world.

HOW is ``raise``, ``kill`` (itself, with SIGKILL) or ``wait`` (each rank writes a file and trains until it is
interrupted). Each rank that meets an exception writes what it saw; rank 0 saves a checkpoint then.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy

torch.set_num_threads(1)
out, how, bad_rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
n = int(sys.argv[4]) if len(sys.argv) > 4 else 2


class Ending(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def setup(self, stage: str) -> None:
        self.pair = self.collective.split(self.collective.rank // 2) if n == 4 else self.collective

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = self.pair.all_reduce(batch, "mean")
        if batch_idx == 3:
            rank = self.global_rank
            (out / f"ready{rank}").write_text(str(os.getpid()))
            if rank == bad_rank and how == "raise":
                raise ValueError("boom")
            if rank == bad_rank and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        if how == "wait" and batch_idx > 3:
            time.sleep(0.05)
        return self.layer(batch).mean()

    def on_exception(self, exception: BaseException) -> None:
        self.note(exception)

    def note(self, exception: BaseException) -> None:
        (out / f"saw{self.global_rank}").write_text(f"{type(exception).__name__}: {exception}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(L.Callback):
    def on_exception(self, trainer: L.Trainer, pl_module: Ending, exception: BaseException) -> None:
        pl_module.note(exception)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=n,
        strategy=CollectiveStrategy("horovod", timeout=40),
        max_steps=100_000,
        max_epochs=100_000,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Notes(), ModelCheckpoint(dirpath=out, filename="saved", save_on_exception=True)],
    )
    trainer.fit(Ending(), DataLoader(torch.ones(400, 1), batch_size=1))
