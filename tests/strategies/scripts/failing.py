"""Jobs that must fail, all of them: ``failing.py OUT``."""

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from toys import Toy, Values, fit, loader, rank, run_forked, trainer

from collective_strategy import CollectiveStrategy

TIMEOUT = 4


def strategy() -> CollectiveStrategy:
    return CollectiveStrategy(timeout=TIMEOUT)


class Raises(Toy):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if rank() == 1 and batch_idx == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def raises_in_training_step() -> None:
    fit(Raises(), [1.0] * 8, strategy=strategy())


class Breaks(Values):
    def __getitem__(self, i: int) -> Tensor:
        if rank() == 1:
            raise ValueError("boom")
        return super().__getitem__(i)


def raises_in_a_loader_worker() -> None:
    trainer(strategy=strategy()).fit(Toy(), DataLoader(Breaks([1.0] * 8), num_workers=1))


class Logs(Toy):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if rank() == 0:
            self.log("v", 1.0, sync_dist=True)


def logs_with_sync_on_one_rank() -> None:
    trainer(strategy=strategy()).validate(Logs(), loader([1.0, 2.0]), verbose=False)


def _save(model: Toy) -> None:
    t = fit(model, [1.0, 2.0], strategy=strategy())
    if rank() == 0:
        t.save_checkpoint(tempfile.mkdtemp() + "/lone.ckpt")
    else:
        time.sleep(6)


def saves_on_one_rank() -> None:
    _save(Toy())


def saves_buffers_on_one_rank() -> None:
    model = Toy()
    model.register_buffer("k", torch.tensor(1.0))
    _save(model)


def misses_a_barrier() -> None:
    class Alone(Toy):
        def on_train_start(self) -> None:
            if rank() == 0:
                self.collective.barrier("alone")
            else:
                time.sleep(6)

    fit(Alone(), [1.0, 2.0], strategy=strategy())


JOBS = (
    raises_in_training_step,
    raises_in_a_loader_worker,
    logs_with_sync_on_one_rank,
    saves_on_one_rank,
    saves_buffers_on_one_rank,
    misses_a_barrier,
)

if __name__ == "__main__":
    run_forked({job.__name__: job for job in JOBS}, Path(sys.argv[1]), deadline=TIMEOUT + 30)
