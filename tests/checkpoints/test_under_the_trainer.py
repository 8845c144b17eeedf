"""Validation, decisions, checkpoint choice and predictions of a 2 x 2 run are those of one process on the same data."""

import os
from typing import Any

import pytest
import torch
from attention import SAMPLES, Counting, Meshed, trainer
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from collective_strategy.checkpoints import is_checkpoint
from collective_strategy.testing import run_ranks

# the first test of a module waits for the runs that all of them look at
pytestmark = pytest.mark.timeout(300)

ODD = 11


class Judged(Meshed):
    """Validated on 11 samples in batches of 2, which four ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        losses = torch.stack([self.net.loss(sample[None]) for sample in batch])
        self.log("val", losses.mean(), sync_dist=True, batch_size=len(batch))
        self.mean.update(losses)

    def on_validation_epoch_end(self) -> None:
        self.log("metric", self.mean.compute())
        self.mean.reset()

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack([self.net.loss(sample[None]) for sample in batch])


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.pairs: dict[int, float] = {}

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.pairs |= dict(zip(batch_indices, prediction.tolist(), strict=True))


def samples() -> DataLoader:
    return DataLoader(torch.arange(SAMPLES - ODD, SAMPLES), batch_size=2)


class InOrder(torch.utils.data.Sampler):
    """A sampler of the user's own, whose order the strategy keeps and deals out: step k is the k-th global batch."""

    def __iter__(self) -> Any:
        return iter(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def run(mesh: dict[str, int], path: str) -> dict[str, Any]:
    """Everything that a run decides and reports."""
    torch.set_num_threads(1)
    best = ModelCheckpoint(path, "{epoch}", monitor="metric", save_top_k=2, save_last=True)
    light = ModelCheckpoint(path, "light-{epoch}", save_weights_only=True, every_n_epochs=2, save_top_k=-1)
    # the loss falls, so that "higher is better" is disappointed at once
    stopping = EarlyStopping("val", mode="max", patience=2, check_on_train_epoch_end=False)
    writer = Writer()
    settings = {"enable_checkpointing": True, "use_distributed_sampler": True, "num_sanity_val_steps": 0}
    fitted = trainer(mesh, 9, callbacks=[best, light, stopping, writer, Counting()], **settings)
    train = DataLoader(torch.arange(SAMPLES), batch_size=4 // mesh["data"], sampler=InOrder())
    module = Judged()
    fitted.fit(module, train, samples())
    result = {
        "logged": {name: value.item() for name, value in fitted.callback_metrics.items()},
        "stopped": (fitted.current_epoch, fitted.global_step),
        "best": os.path.basename(best.best_model_path),
        "scores": {os.path.basename(name): score.item() for name, score in best.best_k_models.items()},
        "files": sorted(os.listdir(path)),
    }
    result["from best"] = fitted.test(module, samples(), ckpt_path="best", verbose=False)[0]
    result["from last"] = fitted.validate(module, samples(), ckpt_path="last", verbose=False)[0]
    weights = sorted(name for name in os.listdir(path) if name.startswith("light"))[0]
    result["from weights"] = fitted.validate(Judged(), samples(), ckpt_path=f"{path}/{weights}", verbose=False)[0]
    fitted.predict(module, samples(), ckpt_path="best", return_predictions=False)
    result["predictions"] = writer.pairs
    result["directories"] = is_checkpoint(f"{path}/last.ckpt")
    longer = trainer(
        mesh, 4, callbacks=[ModelCheckpoint(path, save_last="link", filename="longer-{epoch}")], **settings
    )
    longer.fit(Judged(), train, samples(), ckpt_path=f"{path}/last.ckpt")
    result["longer"] = ({name: v.item() for name, v in longer.callback_metrics.items()}, longer.global_step)
    try:
        longer.fit(Judged(), train, ckpt_path=f"{path}/{weights}")
    except Exception as error:
        result["weights only"] = str(error)
    longer.strategy.collective.teardown()
    result["linked"] = [name for name in sorted(os.listdir(path)) if os.path.islink(f"{path}/{name}")]
    fitted.strategy.collective.teardown()
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    one, four = (str(tmp_path_factory.mktemp(name)) for name in ("one", "four"))
    options: dict[str, Any] = {"backend": None, "fresh": True, "timeout": 100}
    alone = run_ranks(1, lambda _: run({"data": 1, "model": 1}, one), **options)
    ranks = run_ranks(4, lambda _: run({"data": 2, "model": 2}, four), **options)
    return alone[0].result(), [outcome.result() for outcome in ranks]


@pytest.mark.parametrize("name", ["logged", "scores", "from best", "from last", "from weights"])
def test_numbers_are_those_of_one_process(results: Any, name: str) -> None:
    one, ranks = results
    for rank in ranks:
        assert rank[name] == pytest.approx(one[name], rel=1e-6)  # metrics are float32
    assert len({str(rank[name]) for rank in ranks}) == 1


@pytest.mark.parametrize("name", ["stopped", "best", "files", "linked"])
def test_decisions_are_those_of_one_process(results: Any, name: str) -> None:
    one, ranks = results
    assert [rank[name] for rank in ranks] == [one[name]] * 4


def test_the_decisions_are_not_trivial(results: Any) -> None:
    one, ranks = results
    assert one["stopped"] == (3, 30)
    assert one["best"] == "epoch=2.ckpt"
    assert one["files"] == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt", "light-epoch=1.ckpt"]
    assert not one["directories"]
    assert all(rank["directories"] for rank in ranks)


def test_every_sample_is_predicted_once_by_each_model_rank(results: Any) -> None:
    one, ranks = results
    assert len(one["predictions"]) == ODD
    for first, second in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
        assert len(first["predictions"]) + len(second["predictions"]) == ODD
        assert {**first["predictions"], **second["predictions"]} == pytest.approx(one["predictions"], rel=1e-10)


def test_a_run_from_last_goes_on_as_one_process(results: Any) -> None:
    one, ranks = results
    for rank in ranks:
        assert rank["longer"][0] == pytest.approx(one["longer"][0], rel=1e-6)
        assert rank["longer"][1] == one["longer"][1] == 40


def test_training_from_weights_only_is_refused_as_by_lightning(results: Any) -> None:
    one, ranks = results
    for rank in ranks:
        assert "checkpoint contains only the model" in rank["weights only"]
        assert rank["weights only"] == one["weights only"]
