"""The network of :mod:`joined` under the Trainer."""

from typing import Any

import lightning as L
import torch
from joined import MAX_NORM, NAMES, STEPS, Network, Setting, alike, batches, objective, optimizers, place, weights
from torch import nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy


class Fitted(L.LightningModule):
    """Made in ``configure_model``, when the mesh is known. Batches are indices into the data of :mod:`joined`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.net: nn.Module | None = None
        self.automatic_optimization = len(setting.optimizers) == 1

    def configure_model(self) -> None:
        self.data, self.model, self.k = place(self.collective, self.setting)
        self.net = Network(self.setting, self.model)
        with torch.device("cpu"):  # a batch cut out of a device's tensor would be a program of its own on XLA
            self.x, self.whole = batches(self.setting)

    def loss(self, step: int, micro: int) -> torch.Tensor:
        x = self.x[step, micro, self.data, self.k].to(self.device)
        whole = self.whole[step, micro, self.data].to(self.device)
        part = objective(self.net, x, self.data, self.model, self.setting.checkpointing)
        return part + alike(self.net, whole)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        step, micro = divmod(int(batch), self.setting.accumulation)
        if self.automatic_optimization:
            return self.loss(step, micro)
        steppers = self.optimizers()
        self.manual_backward(self.loss(step, micro) / self.setting.accumulation)
        if micro == self.setting.accumulation - 1:
            for stepper in steppers:
                self.clip_gradients(stepper, gradient_clip_val=MAX_NORM, gradient_clip_algorithm="norm")
                stepper.step()
                stepper.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        groups = [
            [p for name in group for p in getattr(self.net, name).parameters()] for group in self.setting.optimizers
        ]
        return optimizers(groups)


def fit(setting: Setting) -> dict[str, Any]:
    """Fits on this rank, whose place the environment says; what it holds at the end."""
    torch.set_num_threads(1)
    automatic = {"accumulate_grad_batches": setting.accumulation, "gradient_clip_val": MAX_NORM}
    data = dict(setting.axes).get("data")
    strategy = CollectiveStrategy(mesh=dict(setting.axes), timeout=60, **({} if data else {"data_axis": None}))
    module = Fitted(setting)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **(automatic if len(setting.optimizers) == 1 else {}),
    )
    trainer.fit(module, DataLoader(torch.arange(STEPS * setting.accumulation), batch_size=1))
    result = weights(module.net, setting, module.model)
    strategy.collective.teardown()
    return result


ONE_OPTIMIZER = (NAMES,)
