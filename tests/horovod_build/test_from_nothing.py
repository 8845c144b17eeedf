"""The script that builds Horovod, on this environment's torch, from nothing; then from the wheel that it kept."""

import json
import os
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from empty_environment import EmptyEnvironment

PROGRAM = str(Path(__file__).parent / "three_ranks.py")
X = np.outer([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])  # row k: the tensor of rank k


def expected(rank: int) -> dict[str, object]:
    """What numpy makes of the list of inputs."""
    mine = X[rank]
    values = {
        "sum": X.sum(0), "mean": X.mean(0), "max": X.max(0), "min": X.min(0), "prod": X.prod(0),
        "bfloat16": X.sum(0), "int64": np.array([3 * 2**53 + 3]), "bool": np.array([True, True]),
        "all_gather": X, "ragged": np.concatenate([row[: k + 1] for k, row in enumerate(X)]), "broadcast": X[1],
        "reduce_scatter": X.sum(0)[rank : rank + 1], "scatter": X[2][rank : rank + 1], "all_to_all": X[:, rank],
        "shift": X[rank - 1],
        # each rank's loss is (rank + 1) times the sum of all elements
        "gradient": np.full(3, 6.0), "group": X[1:].sum(0) if rank else mine,
    }  # fmt: skip
    plain = {name: value.tolist() for name, value in values.items()}
    return {**plain, "objects": [{"rank": k} for k in range(3)], "torch": torch.__version__}


def works(environment: EmptyEnvironment) -> None:
    finished = environment.run(PROGRAM, path=os.environ["PATH"], timeout=200)
    assert finished.returncode == 0, finished.stdout
    assert json.loads(finished.stdout.splitlines()[-1]) == [expected(rank) for rank in range(3)]


@pytest.mark.extended
@pytest.mark.timeout(1500)
def test_horovod_is_built_unattended_and_comes_back_without_a_compiler(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    first = EmptyEnvironment(tmp_path / "first")
    said = first.install_horovod(wheels, path=os.environ["PATH"], timeout=1200)
    assert "Building Horovod 0.28.1 with C++" in said
    assert f"Horovod 0.28.1 for torch {version('torch')} is installed." in said
    works(first)
    again = first.install_horovod(wheels, path=str(tmp_path), timeout=100)
    assert f"Horovod 0.28.1 for torch {version('torch')} is installed already." in again

    second = EmptyEnvironment(tmp_path / "second")
    no_compiler = tmp_path / "no_compiler"
    no_compiler.mkdir()
    said = second.install_horovod(wheels, path=str(no_compiler), timeout=200)
    assert "Using the wheel that was built before" in said
    assert "Building" not in said
    works(second)
