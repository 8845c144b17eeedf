"""A fit in which one rank raises "boom" at a chosen place.

``raising.py PLACE RANK``: as a script, under any launcher.
``raising.py --all OUT``: every place, each on two freshly forked processes that have imported everything.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from toys import Values, rank, run_forked, trainer

from collective_strategy import Collective, CollectiveStrategy

PLACES = (
    "prepare_data",
    "setup",
    "configure_model",
    "sanity_check",
    "training_step",
    "backward_hook",
    "optimizer_step",
    "validation",
    "save",
    "loader_worker",
    "on_exception",
    "teardown",
)
TIMEOUT = int(os.environ.get("RAISING_TIMEOUT", "4"))
place, raising_rank = "", -1


def boom(where: str, times: int = 1) -> None:
    if where == place and rank() == raising_rank:
        print(f"\nRAISED {where} at {time.time()}", flush=True)
        raise ValueError("boom")


class Items(Values):
    def __getitem__(self, i: int) -> Tensor:
        if torch.utils.data.get_worker_info() is not None:
            boom("loader_worker")
        return super().__getitem__(i)


class Raising(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("count", torch.tensor(0))

    def prepare_data(self) -> None:
        boom("prepare_data")

    def setup(self, stage: str) -> None:
        boom("setup")

    def configure_model(self) -> None:
        boom("configure_model")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        boom("training_step")
        if place == "on_exception" and rank() == raising_rank:
            raise KeyError("first")
        y = self.layer(batch.view(-1, 1))
        y.register_hook(lambda _: boom("backward_hook"))
        loss = y.mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        boom("sanity_check" if self.trainer.sanity_checking else "validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # not the one that ModelCheckpoint saves because of the exception
        if self.trainer.state.status != "interrupted":
            boom("save")

    def on_exception(self, exception: BaseException) -> None: ...

    def teardown(self, stage: str) -> None:
        boom("teardown")

    def configure_optimizers(self) -> Any:
        class Sgd(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                result = super().step(closure)
                boom("optimizer_step")
                return result

        return Sgd(self.parameters(), lr=0.1)


class Handler(L.Callback):
    def on_exception(self, *args: Any) -> None:
        boom("on_exception")


def run(where: str, who: int, directory: str) -> None:
    global place, raising_rank
    place, raising_rank = where, who
    barrier = Collective.barrier

    def told(self: Collective, name: str | None = None) -> None:
        print(f"\nBARRIER {rank()} {name}", flush=True)
        barrier(self, name)

    Collective.barrier = told  # type: ignore[method-assign]
    saving = ModelCheckpoint(directory, save_on_exception=True, monitor="loss", save_top_k=1)
    t = trainer(
        strategy=CollectiveStrategy(timeout=TIMEOUT),
        callbacks=[Handler(), saving],
        enable_checkpointing=True,
        num_sanity_val_steps=1,
        max_epochs=2,
    )
    workers = 1 if where == "loader_worker" else 0
    data = DataLoader(Items([1.0] * 6), num_workers=workers)
    t.fit(Raising(), data, DataLoader(Items([1.0] * 4)))
    print("\nFINISHED", flush=True)


def run_all(out: Path) -> None:
    """The places on alternating ranks (prepare_data is called on rank 0 only), the most common ones on both."""
    chosen = [(where, i % 2) for i, where in enumerate(PLACES)]
    chosen += [(where, 1 - who) for where, who in chosen if where in ("training_step", "validation", "save")]
    jobs = {
        f"{where}-{who}": lambda where=where, who=who: run(where, who, str(out / f"checkpoints-{where}-{who}"))
        for where, who in chosen
    }
    run_forked(jobs, out, deadline=TIMEOUT + 30, at_once=2)


if __name__ == "__main__":
    if sys.argv[1] == "--all":
        run_all(Path(sys.argv[2]))
    else:
        run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
