"""State of the ranks: buffers, checkpoints, resuming, decisions, different models, runs after one another."""

from pathlib import Path
from typing import Any

import pytest
from launched import Ended, run

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)

NAMES = (
    "sync_batchnorm_on_cpu",
    "buffers",
    "resume",
    "decisions",
    "reduce_and_gather",
    "fit_test_fit",
    "different_models",
    "different_shapes",
    "slow_prepare_data",
    "collective_attribute",
    "mixin_under_another_strategy",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Ended:
    out = tmp_path_factory.mktemp("state")
    ended = run("part_c.py", *NAMES, out=out, env={"SHARED_DIRECTORY": str(directory)})
    assert ended.codes == [0], ended.output
    return ended


def _same(job: Ended, name: str) -> Any:
    first, second = job.values(name)
    assert first == second
    return first


def test_synchronised_batch_norm_on_cpu_is_refused_at_setup(job: Ended) -> None:
    for error in job.errors("sync_batchnorm_on_cpu"):
        assert "SyncBatchNorm does not run on CPU" in error


def test_buffers_are_equal_at_start_at_validation_and_in_the_checkpoint(job: Ended) -> None:
    """Those of rank 0, whatever each rank wrote in between; the same for a bool that is not saved."""
    assert _same(job, "buffers") == {"start": 0.0, "flag": True, "validation": 7.0, "file": 20.0, "after": 20.0}


def test_resuming_equals_training_straight_through(job: Ended) -> None:
    result = _same(job, "resume")
    half = result["half"]
    assert -0.83 < half < -0.62  # 0.1 m and 0.1 (5 - m) + 0.09 m for a first mean m between 1.5 and 3.5
    assert result == {
        "half": half,
        "equal": True,
        "steps": [4, 4],
        "epochs": [2, 2],
        "exists": True,
        "left": ["resume.ckpt"],
    }


def test_a_checkpoint_of_two_ranks_loads_in_one_process(job: Ended, directory: Path, tmp_path: Path) -> None:
    env = {"SHARED_DIRECTORY": str(directory), "RANKS": "1"}
    one = run("part_c.py", "load_in_one_process", out=tmp_path, env=env)
    assert one.values("load_in_one_process") == [[_same(job, "resume")["half"], 1]]


def test_ranks_agree_on_stopping(job: Ended) -> None:
    result = _same(job, "decisions")
    assert result["decisions"] == [False, True]
    assert result["types"] == ["bool", "bool"]
    assert 1 <= result["epoch"] < 8


def test_reduce_gather_and_broadcast_as_lightning_calls_them(job: Ended) -> None:
    zero, one = job.values("reduce_and_gather")
    assert zero["int_mean"] == [2.5]
    assert zero["int_mean_dtype"] == "torch.float32"
    assert zero["native"] == [3]
    assert zero["sum"] == [3.0]
    assert [zero["kept"], one["kept"]] == [[1.0], [2.0]]
    assert zero["text"] == "a"
    assert zero["shape"] == [2, 1]
    assert [zero["grad"], one["grad"]] == [[3.0], [3.0]]
    assert not zero["detached"]
    assert one["nested"] == {"a": [0, 1], "b": [[[0.0, 0.0], [1.0, 1.0]]]}
    assert one["object"] == {"rank": 0, "none": None}


def test_fit_then_test_then_fit_again_with_another_trainer(job: Ended) -> None:
    assert _same(job, "fit_test_fit") == {"w": -3.0, "tested": -1.5}


def test_ranks_that_build_different_models_are_told_apart(job: Ended) -> None:
    for error in job.errors("different_models"):
        assert "rank 1 has parameter extra.weight (2, 3) that rank 0 lacks" in error
    for error in job.errors("different_shapes"):
        assert "parameter layer.weight has shape (2, 3) on rank 0 and (2, 4) on rank 1" in error


def test_prepare_data_may_take_longer_than_the_timeout(job: Ended) -> None:
    assert _same(job, "slow_prepare_data") == -1.5


def test_any_module_and_datamodule_has_the_collective(job: Ended) -> None:
    zero, one = job.values("collective_attribute")
    assert "setup() and configure_model()" in zero["message"]
    assert zero["places"] == {"setup": 2, "configure_model": [0, 1], "training_step": [2, 3]}
    assert [zero["data"], one["data"]] == [[0, 2], [1, 2]]
    assert zero["typed"] == 2


def test_a_class_that_uses_the_name_keeps_it_with_one_warning(job: Ended) -> None:
    for result in job.values("collective_attribute"):
        assert [result["named"], result["assigned"]] == ["mine", "Linear"]
    assert job.output.count("Named uses the attribute name 'collective'") == 2  # once per rank
    assert job.output.count("Assigned uses the attribute name 'collective'") == 2


def test_the_mixin_works_under_another_strategy_and_others_are_told(job: Ended) -> None:
    result = _same(job, "mixin_under_another_strategy")
    assert result["found"] == [2, 2, "TorchDistributedCollective"]
    assert "DDPStrategy, which has no collective" in result["message"]
    assert "CollectiveModule" in result["message"]
