"""Loss scaling by the Trainer's precision plugin where model ranks hold different weights."""

from typing import Any

import lightning as L
import pytest
import torch
from engine_ranks import MESH_2X2
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy, shared
from collective_strategy.testing import run_ranks


class Model(L.LightningModule):
    """Gradients: 12 for the shared weight, 3 and 4 for the pieces; in the second step infinite on model rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.common = shared(nn.ParameterList([nn.Parameter(torch.zeros(()))]), over="model")
        self.piece = nn.ParameterList([nn.Parameter(torch.zeros(()))])
        self.scales: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        model = self.collective["model"].rank
        own = float("inf") if batch_idx == 1 and model == 1 else 3.0 + model
        return self.common[0] * 6 + self.piece[0] * own

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(_: Any) -> dict[str, Any]:
    strategy = CollectiveStrategy(mesh=MESH_2X2, timeout=30)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Model()
    trainer.fit(model, DataLoader([0.0, 0.0, 0.0], batch_size=1))
    strategy.collective.teardown()
    own_again = "unscale_" not in vars(scaler)
    return {"w": [model.common[0].item(), model.piece[0].item()], "scales": model.scales, "own": own_again}


def test_all_ranks_skip_the_step_together_and_clip_the_others_alike():
    """Two steps of (12, 3, 4) / 13; the one between is skipped everywhere and halves the scale everywhere."""
    results = [outcome.result() for outcome in run_ranks(4, fit, backend=None, fresh=True, timeout=60)]
    for rank, found in enumerate(results):
        assert found["scales"] == [4.0, 2.0, 2.0]
        assert found["w"] == pytest.approx([-24 / 13, -2 * (3 + rank % 2) / 13], rel=1e-5)
        assert found["own"]
    assert len({found["w"][0] for found in results}) == 1
