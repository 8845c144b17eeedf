"""One module and one set of data under a Trainer, on any backend, in the ranks that exist already."""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from collective_strategy import CollectiveStrategy, SharedModule

STEPS = 20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layer(width: int, height: int, seed: int) -> nn.Linear:
    """With weights that depend on the seed only: the global random state belongs to all ranks of a process."""
    made = nn.utils.skip_init(nn.Linear, width, height)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator(seed)) / width**0.5)
    return made


class Net(L.LightningModule):
    """Regression with tied weights; over a mesh, a shared and a private layer, and a collective in between."""

    def __init__(self, place: int, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        first = layer(6, 16, 1)
        self.first = SharedModule(first, over="model") if shared else first
        self.own = layer(16, 16, 2 + place if shared else 2)
        self.again = layer(16, 16, 3) if shared else self.own  # tied
        self.last = layer(16, 2, 4)

    def forward(self, x):
        y = torch.tanh(self.own(torch.tanh(self.first(x))))
        if self.shared:
            y = y + self.collective["model"].all_reduce(y, "mean", to="replicate")
        return self.last(torch.tanh(self.again(y)))

    def loss(self, batch):
        return (self(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, _):
        loss = self.loss(batch)
        if self.collective.rank == 0:
            # an operation that only this rank has, and that stays pending
            self.only_here = (loss.detach() * 3 + 1).sin()
        self.log("training", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, _):
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def data(seed: int, size: int) -> TensorDataset:
    x = torch.randn(size, 6, generator=generator(seed))
    return TensorDataset(x, x[:, :2] * 2 - 1)


class Compilations(L.Callback):
    """How many programs XLA had compiled for all ranks after each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        import torch_xla.debug.metrics as metrics

        trainer.strategy.barrier()  # the counter is the process', and the ranks compile one after the other
        self.counts.append(metrics.counter_value("UncachedCompile") or 0)
        trainer.strategy.barrier()


def trainer(backend: str, devices: Any, folder: str | None, *, mesh=None, steps: int = STEPS, **options: Any) -> Any:
    callbacks = options.pop("callbacks", [])
    if folder is not None:
        callbacks = [*callbacks, ModelCheckpoint(folder, save_last=True, monitor="validation")]
    return L.Trainer(
        accelerator="cpu", devices=devices, strategy=CollectiveStrategy(backend, mesh=mesh, timeout=60),
        max_steps=steps, callbacks=callbacks, logger=False, enable_checkpointing=folder is not None,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def fit(place: int, backend: str, n: int, folder: str | None, mesh=None, resume: bool = False) -> dict[str, Any]:
    """20 steps of two batches each, clipped; with ``resume`` the last twelve by another Trainer, from the file."""
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    training, validation = DataLoader(data(1, 32 * n), 4), DataLoader(data(2, 8 * n), 4)
    module = Net(place, mesh is not None)
    devices = "auto" if backend == "xla" else n
    if resume:
        first = trainer(backend, devices, folder, mesh=mesh, steps=8, **settings)
        first.fit(module, training, validation)
        first.strategy.collective.teardown()
        module = Net(place, mesh is not None)
    stop = EarlyStopping("validation", patience=1000, check_on_train_epoch_end=False)
    run = trainer(backend, devices, folder, mesh=mesh, callbacks=[stop], **settings)
    path = os.path.join(folder, "last.ckpt") if resume and folder else None
    run.fit(module, training, validation, ckpt_path=path)
    run.strategy.collective.teardown()  # otherwise it stays open until the process ends
    return {
        "weights": {name: value.cpu() for name, value in module.state_dict().items()},
        "steps": run.global_step,
        "tied": module.again.weight is module.own.weight,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "rank": run.strategy.global_rank,
    }


def rank_here(backend: str) -> int:
    """That of the rank of `run_ranks` in which this is called."""
    if backend == "xla":
        import torch_xla.runtime as runtime

        return runtime.global_ordinal()
    return int(os.environ["RANK"])


def fit_here(_: Any, backend: str, n: int, folder: str | None, mesh=None, resume: bool = False) -> dict[str, Any]:
    """In a rank of `run_ranks` without a collective."""
    rank = rank_here(backend)
    return fit(rank % 2, backend, n, folder, mesh, resume)


def fit_epochs(_: Any, backend: str, n: int, source: str | None, target: str | None, epochs: int) -> dict[str, Any]:
    """Four steps of one batch each per epoch, the same batches in each; resumed from one file and saved to another."""
    module = Net(0, False)
    run = trainer(
        backend, "auto" if backend == "xla" else n, None, steps=-1, max_epochs=epochs, use_distributed_sampler=False
    )
    run.fit(module, DataLoader(own_batches(rank_here(backend), n, 4), BATCH), ckpt_path=source)
    if target is not None:
        run.save_checkpoint(target)
    run.strategy.collective.teardown()
    return {"weights": {name: value.cpu() for name, value in module.state_dict().items()}, "steps": run.global_step}


BATCH = 4


def own_batches(rank: int, n: int, micro_batches: int) -> TensorDataset:
    """This rank's samples, in order."""
    x, y = data(1, BATCH * n * micro_batches).tensors
    return TensorDataset(x[rank::n], y[rank::n])


def fit_clipped(_: Any, n: int, accumulation: int, clip: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """20 steps, clipped, on this rank's own batches; the weights on the host and the number of steps."""
    import torch_xla.runtime as runtime

    module = Net(0, False)
    run = trainer("xla", "auto", None, accumulate_grad_batches=accumulation, use_distributed_sampler=False, **clip)
    run.fit(module, DataLoader(own_batches(runtime.global_ordinal(), n, STEPS * accumulation), BATCH))
    run.strategy.collective.teardown()
    return dict(module.state_dict()), run.global_step


def fit_in_one_process(n: int, accumulation: int, clip: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The weights that a plain loop gives on the batches of all ranks, and how often it clipped."""
    module = Net(0, False)
    optimizer, clipped = module.configure_optimizers(), 0
    batches = [list(DataLoader(own_batches(rank, n, STEPS * accumulation), BATCH)) for rank in range(n)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for rank in range(n):
                (module.loss(batches[rank][step * accumulation + micro]) / (n * accumulation)).backward()
        parameters, limit = list(module.parameters()), clip["gradient_clip_val"]
        if clip["gradient_clip_algorithm"] == "norm":
            clipped += int(nn.utils.clip_grad_norm_(parameters, limit) > limit)
        else:
            clipped += int(max(p.grad.abs().max() for p in parameters if p.grad is not None) > limit)
            nn.utils.clip_grad_value_(parameters, limit)
        optimizer.step()
    return dict(module.state_dict()), clipped
