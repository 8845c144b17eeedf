"""The launcher's variables, read by a Trainer: environment only, nothing is started."""

import os
from collections.abc import Iterator

import lightning as L
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from collective_strategy import CollectiveStrategy

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
STANDARD = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from collective_strategy.strategies.lightning_package import NAMES

    ranks = [getattr(module, "rank", None) for module in NAMES.rank_zero_modules]
    before = dict(os.environ)
    for name in before:
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in LAUNCHER:
            monkeypatch.delenv(name)
    yield
    for module, rank in zip(NAMES.rank_zero_modules, ranks, strict=True):
        module.rank = rank


def _trainer(devices: int = 2, strategy: object = None, **kwargs: object) -> L.Trainer:
    strategy = CollectiveStrategy() if strategy is None else strategy
    return L.Trainer(devices=devices, accelerator="cpu", strategy=strategy, logger=False, **kwargs)


def _place(trainer: L.Trainer) -> list[int]:
    s = trainer.strategy
    return [s.global_rank, s.local_rank, s.node_rank, s.world_size]


def _set(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("strategy", [None, "collective"])
def test_half_set_environment_names_all_that_is_missing(monkeypatch: pytest.MonkeyPatch, strategy: object) -> None:
    _set(monkeypatch, RANK=0, WORLD_SIZE=2)
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*MASTER_PORT"):
        _trainer(strategy=strategy)


def test_world_size_without_rank_is_no_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, WORLD_SIZE=2, **STANDARD)
    with pytest.raises(ValueError, match="RANK"):
        _trainer()


def test_standard_variables_without_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=1, WORLD_SIZE=2, **STANDARD)
    trainer = _trainer()
    assert _place(trainer) == [1, 1, 0, 2]
    assert trainer.strategy.cluster_environment.creates_processes_externally


def test_devices_must_fit_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=1, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, **STANDARD)
    with pytest.raises(ValueError, match=r"devices=2 and num_nodes=1, which is 2 processes.*started 4.*devices=4"):
        _trainer(2)


def test_one_process_per_node_started_by_hand_launches_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own way: NODE_RANK, WORLD_SIZE and the address, but no RANK."""
    _set(monkeypatch, NODE_RANK=1, WORLD_SIZE=4, **STANDARD)
    trainer = _trainer(2, num_nodes=2)
    assert _place(trainer) == [2, 0, 1, 4]
    assert not trainer.strategy.cluster_environment.creates_processes_externally


def test_slurm_with_contradicting_numbers_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_NTASKS=1, SLURM_NTASKS_PER_NODE=2, SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NODEID=0)
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=1.*SLURM_NTASKS_PER_NODE=2"):
        _trainer(2)


def test_slurm_batch_step_gives_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--ntasks`` without ``--ntasks-per-node``, which Lightning refuses."""
    _set(monkeypatch, SLURM_NTASKS=4, SLURM_PROCID=3, SLURM_LOCALID=1, SLURM_NODEID=1, SLURM_JOB_NAME="train")
    assert _place(_trainer(2, num_nodes=2)) == [3, 1, 1, 4]


def test_slurm_with_tasks_per_node_keeps_lightnings_requeueing(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 2, "SLURM_JOB_NAME": "train"}
    _set(monkeypatch, SLURM_PROCID=3, SLURM_LOCALID=1, SLURM_NODEID=1, **tasks)
    for strategy in (None, "collective"):
        trainer = _trainer(2, num_nodes=2, strategy=strategy)
        assert _place(trainer) == [3, 1, 1, 4]
        assert isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
    with pytest.raises(ValueError, match=r"devices=3.*started 4 \(SLURM_NTASKS=4\)"):
        _trainer(3, num_nodes=2)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_interactive_slurm_is_a_local_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _set(monkeypatch, SLURM_NTASKS=4, SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NODEID=0, SLURM_JOB_NAME=name)
    trainer = _trainer(2)
    assert _place(trainer) == [0, 0, 0, 2]
    assert not trainer.strategy.cluster_environment.creates_processes_externally


@pytest.mark.parametrize("strategy", [None, "collective", "collective_torch"])
def test_torchrun_inside_slurm_wins(monkeypatch: pytest.MonkeyPatch, strategy: object) -> None:
    _set(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=1, SLURM_LOCALID=0, SLURM_NODEID=0, SLURM_JOB_NAME="train")
    _set(monkeypatch, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, TORCHELASTIC_RUN_ID="x", **STANDARD)
    assert _place(_trainer(strategy=strategy)) == [1, 1, 0, 2]


def test_a_users_cluster_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(LightningEnvironment): ...

    own = Own()
    assert _trainer(plugins=[own]).strategy.cluster_environment is own
    assert _trainer(strategy=CollectiveStrategy(cluster_environment=own)).strategy.cluster_environment is own


def test_the_one_process_collective_refuses_several_devices() -> None:
    with pytest.raises(ValueError, match=r"devices=2.*set devices=1"):
        _trainer(2, strategy="collective_single")
    assert _trainer(1, strategy="collective_single").strategy.collective.backend_name == "single"
