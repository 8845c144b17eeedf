"""The strategy as an object: names, packages, pickling, checkpoints, what is usable when. One process."""

import copy
import importlib
import os
import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from collective_strategy import CollectiveModule, CollectiveStrategy, SingleProcessCollective
from collective_strategy.strategies.communication import operation_name
from collective_strategy.strategies.lightning_package import AtomicCheckpointIO


class Net(CollectiveModule, L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.shapes: list[Any] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.shapes = [self.all_gather(torch.ones(3)).shape, self.collective.all_gather(torch.ones(3)).shape]
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trainer(strategy: Any, package: Any = L, **kwargs: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return package.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **quiet, **kwargs)


def _data() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(2, 1)))


@pytest.mark.parametrize("strategy", ["collective", "collective_torch", "collective_single"])
def test_names_are_registered_and_work_on_one_device(strategy: str) -> None:
    model = Net()
    trainer = _trainer(strategy, enable_model_summary=False)
    trainer.fit(model, _data())
    assert model.shapes == [torch.Size([1, 3])] * 2
    assert type(trainer.strategy) is CollectiveStrategy
    # the next Trainer of this process may have several devices
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & set(os.environ)
    assert not trainer.strategy.collective.is_set_up


def test_names_of_backends_that_do_not_exist_are_not_registered() -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        _trainer("collective_gloo")


def test_without_torch_xla_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"collective_strategy\[xla\]"):
        _trainer("collective_xla")


@pytest.mark.pytorch_lightning
def test_the_other_package_has_its_own_class_under_the_same_names() -> None:
    pl = importlib.import_module("pytorch_lightning")
    other = importlib.import_module("collective_strategy.pytorch_lightning")
    trainer = _trainer("collective", pl)
    assert type(trainer.strategy) is other.CollectiveStrategy
    assert isinstance(trainer.strategy, pl.strategies.ParallelStrategy)


def test_a_strategy_of_the_other_package_is_refused_with_both_names() -> None:
    pl = importlib.import_module("pytorch_lightning")
    with pytest.raises(ValueError, match=r"collective_strategy.CollectiveStrategy .* package 'lightning'"):
        _trainer(CollectiveStrategy(), pl)


def test_construction_is_cheap_and_picklable() -> None:
    strategy = pickle.loads(pickle.dumps(CollectiveStrategy("torch", backend="gloo", timeout=5)))
    assert strategy.collective.timeout.total_seconds() == 5
    assert not strategy.collective.is_set_up
    with pytest.raises(RuntimeError, match="before the collective was set up"):
        strategy.collective.all_reduce(1)
    strategy.barrier("harmless")
    assert strategy.broadcast("own") == "own"


def test_a_collective_of_ones_own_brings_its_settings_itself() -> None:
    with pytest.raises(ValueError, match=r"SingleProcessCollective and also timeout, backend"):
        CollectiveStrategy(SingleProcessCollective(), timeout=3, backend="gloo")
    with pytest.raises(TypeError, match="backend's name or a Collective"):
        CollectiveStrategy(3)
    with pytest.raises(ValueError, match="start_method"):
        CollectiveStrategy(start_method="thread")
    with SingleProcessCollective().setup() as mine:
        model = Net()
        _trainer(CollectiveStrategy(mine)).fit(model, _data())
        assert mine.is_set_up  # who opened it closes it


def test_trained_modules_can_be_copied_and_pickled() -> None:
    model = Net()
    trainer = _trainer("collective")
    trainer.fit(model, _data())
    twin = copy.deepcopy(model)
    assert torch.equal(twin.layer.weight, model.layer.weight)
    model.trainer = None
    assert torch.equal(pickle.loads(pickle.dumps(model)).layer.weight, model.layer.weight)


def test_the_collective_of_a_module_without_a_trainer() -> None:
    class Plain(L.LightningModule): ...

    with pytest.raises(RuntimeError, match=r"setup\(\) and configure_model\(\)"):
        _ = Plain().collective
    with pytest.raises(RuntimeError, match=r"setup\(\) and configure_model\(\)"):
        _ = L.LightningDataModule().collective
    assert Net().collective.world_size == 1


def test_the_mixin_gives_no_local_answer_when_there_are_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"2 processes, but torch\.distributed is not initialised"):
        _ = Net().collective


def test_a_module_that_registers_the_name_keeps_it() -> None:
    class Buffers(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.collective = nn.Linear(2, 2)

    assert isinstance(Buffers().collective, nn.Linear)
    assert isinstance(copy.deepcopy(Buffers()).collective, nn.Linear)


def test_reductions_in_lightnings_and_torchs_spelling() -> None:
    ops = torch.distributed.ReduceOp
    assert [operation_name(op) for op in (None, "avg", "AVG", "mean", "Sum", "product")] == [
        "mean",
        "mean",
        "mean",
        "mean",
        "sum",
        "prod",
    ]
    assert [operation_name(op) for op in (ops.SUM, ops.AVG, ops.MAX, ops.MIN, ops.PRODUCT)] == [
        "sum",
        "mean",
        "max",
        "min",
        "prod",
    ]


def test_a_checkpoint_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    class Breaks:
        def __reduce__(self) -> Any:
            raise ValueError("boom")

    io, path = AtomicCheckpointIO(), tmp_path / "deep" / "last.ckpt"
    io.save_checkpoint({"a": 1}, path)
    with pytest.raises(ValueError, match="boom"):
        io.save_checkpoint({"a": Breaks()}, path)
    assert io.load_checkpoint(path, weights_only=False) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]
