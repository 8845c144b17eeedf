"""What the Trainer may ask for that cannot be: a checkpoint after an error, another CheckpointIO, storage options."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attention import Meshed, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor

from collective_strategy import CollectiveStrategy
from collective_strategy.checkpoints import consolidate, is_checkpoint
from collective_strategy.collectives.errors import CollectiveTimeoutError
from collective_strategy.testing import Outcome, run_ranks

# the first test of a module waits for the runs that all of them look at
pytestmark = pytest.mark.timeout(180)

MESH = {"data": 2, "model": 2}


class Own(TorchCheckpointIO):
    """A user's, which might encrypt."""


class Raises(Meshed):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.collective.rank == 2:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def attempt(path: str, strategy: CollectiveStrategy, **options: Any) -> dict[str, Any]:
    fitted = trainer(MESH, 1, limit_train_batches=2, strategy=strategy)
    error = ""
    try:
        fitted.fit(Meshed())
        fitted.save_checkpoint(path, **options)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    fitted.strategy.collective.teardown()
    return {"error": error, "there": is_checkpoint(path)}


def scenarios(note: Callable[[dict[str, Any]], None], directory: str) -> None:
    def strategy(io: Any = None) -> CollectiveStrategy:
        return CollectiveStrategy(mesh=MESH, timeout=30, checkpoint_io=io)

    note(
        {
            "own": attempt(f"{directory}/own", strategy(Own())),
            "options": attempt(f"{directory}/options", strategy(), storage_options={"a": 1}),
            "background": attempt(f"{directory}/background", strategy(AsyncCheckpointIO())),
        }
    )
    saving = ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    trainer(MESH, 1, callbacks=[saving], enable_checkpointing=True).fit(Raises())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("errors"))


@pytest.fixture(scope="module")
def outcomes(directory: str) -> list[Outcome]:
    def on_rank(_: Any) -> None:
        results = Path(directory, f"rank{os.environ['RANK']}.json")

        def note(found: dict[str, Any]) -> None:
            results.write_text(json.dumps(found))

        scenarios(note, directory)

    return run_ranks(4, on_rank, backend=None, fresh=True, timeout=90)


@pytest.fixture(scope="module")
def ranks(outcomes: list[Outcome], directory: str) -> list[dict[str, Any]]:
    return [json.loads(Path(directory, f"rank{rank}.json").read_text()) for rank in range(4)]


def test_another_checkpoint_io_and_storage_options_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "The CheckpointIO Own writes one file from one process" in rank["own"]["error"]
        assert "save_checkpoint(storage_options=...) is not possible with model-parallel" in rank["options"]["error"]
        assert not rank["own"]["there"]
        assert not rank["options"]["there"]


def test_a_wrapper_that_saves_in_the_background_saves_in_the_foreground(ranks: list[dict[str, Any]]) -> None:
    assert [rank["background"] for rank in ranks] == [{"error": "", "there": True}] * 4


def test_after_an_exception_no_half_checkpoint_is_written_and_nobody_waits(
    outcomes: list[Outcome], directory: str
) -> None:
    assert str(outcomes[2].error) == "boom"
    assert all(outcome.error is not None for outcome in outcomes)
    assert not any(isinstance(outcome.error, CollectiveTimeoutError) for outcome in outcomes)
    saved = sorted(name for name in os.listdir(directory) if name.startswith("step="))
    assert saved == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    for name in saved:
        assert consolidate(f"{directory}/{name}")["net.steps"].item() == int(name[5])
    assert not [name for name in os.listdir(directory) if name.startswith(".unfinished")]
