"""The tools under the Trainer on a 2 x 2 mesh: drift is found within n steps, named, mended; the table is printed."""

import contextlib
import io
import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from collective_strategy import CollectiveStrategy, ExplainSharing, VerifyReplicas, sharded, shared
from collective_strategy.inspection import ReplicaDriftError
from collective_strategy.testing import run_ranks


class Model(L.LightningModule):
    """On rank 3 one element of the shared norm jumps after step 3, and Adam's average of it too."""

    def __init__(self, jumps: bool = True) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))
        self.norm = shared(nn.LayerNorm(4), over="model")
        self.proj = sharded(nn.Linear(4, 2), "*", over="model", dim=0)
        self.jumps = jumps

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.proj(self.norm(torch.arange(4.0) + self.collective.rank)).square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.jumps and self.collective.rank == 3 and self.trainer.global_step == 3:
            self.norm.weight.data[1] += 0.5
            self.trainer.optimizers[0].state[self.norm.weight]["exp_avg"][1] += 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def trainer(*callbacks: Any, strategy: Any = None, **options: Any) -> L.Trainer:
    strategy = strategy or CollectiveStrategy(mesh={"data": 2, "model": 2}, timeout=30)
    return L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=1,
        callbacks=list(callbacks),
        **options,
    )


def fits(_: Any) -> dict[str, Any]:
    data = DataLoader(list(range(9)), batch_size=1)
    seen: dict[str, Any] = {}
    mending = trainer(ExplainSharing(), VerifyReplicas(every_n_steps=4, repair=True))
    printed = io.StringIO()
    model = Model()
    with contextlib.redirect_stdout(printed):
        mending.fit(model, data)
    seen["printed"] = printed.getvalue()
    seen["norm"] = model.norm.weight.tolist(), mending.optimizers[0].state[model.norm.weight]["exp_avg"].tolist()
    seen["after"] = mending.strategy.verify(optimizer_states=True).ok
    # in one place that all ranks reach, since the error ends the run
    early = trainer(VerifyReplicas(every_n_steps=4), accumulate_grad_batches=2)
    try:
        early.fit(Model(), data)
    except ReplicaDriftError as error:
        seen["error"] = str(error).splitlines()[1].strip(), early.global_step
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [outcome.result() for outcome in run_ranks(4, fits, backend=None, fresh=True, timeout=60)]


def test_drift_is_reported_within_n_steps_with_name_ranks_and_size(ranks):
    for rank in ranks:
        message, step = rank["error"]
        assert message.startswith("norm.weight differs over axes data, model: rank 3 from ranks 0, 1, 2 by at most 0.")
        assert message.endswith("in 1 of 4 elements")
        assert step == 4


def test_drift_is_mended_with_the_optimizer_state_and_training_goes_on(ranks):
    assert all(rank["norm"] == ranks[0]["norm"] for rank in ranks)
    assert [rank["after"] for rank in ranks] == [True] * 4


def test_the_table_is_printed_once_by_rank_0(ranks):
    assert "norm.weight  4      float32  shared, sum" in ranks[0]["printed"].replace("sharded, dim 0", "shared, sum   ")
    assert ranks[0]["printed"].count("Weights of all ranks on the mesh data 2 x model 2") == 1
    assert [rank["printed"] for rank in ranks[1:]] == [""] * 3


@pytest.mark.parametrize("callback", [ExplainSharing(), VerifyReplicas()])
def test_another_strategy_is_refused(callback):
    fit = L.Trainer(
        accelerator="cpu", devices=1, callbacks=[callback], logger=False, enable_checkpointing=False, max_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip

    class Plain(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            return None

    with pytest.raises(TypeError, match="needs the collective strategy, which knows what weights are; the Trainer has"):
        fit.fit(Plain(), DataLoader([0.0]))


def test_before_set_up_and_with_wrong_numbers():
    with pytest.raises(RuntimeError, match=r"strategy\.verify\(\) works once trainer\.fit"):
        CollectiveStrategy().verify()
    with pytest.raises(RuntimeError, match=r"strategy\.explain\(\) works once trainer\.fit"):
        CollectiveStrategy().explain()
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1"):
            VerifyReplicas(every_n_steps=wrong)
