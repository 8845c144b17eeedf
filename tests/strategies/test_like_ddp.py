"""A ddp script becomes ours by one import and the string: bit-equal weights, interchangeable checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run

# the first test of a module waits for the jobs that all of them look at
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("trained")
    ended = run("like_ddp.py", str(out), timeout=250)
    assert ended.codes == [0], ended.output
    return {name: out / name for name in ("ddp", "collective")}


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def _assert_equal(a: Any, b: Any, place: str = "") -> None:
    assert type(a) is type(b), place
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{place}: {(a - b).abs().max()}"
    elif isinstance(a, dict):
        assert list(a) == list(b), place
        for key in a:
            _assert_equal(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), place
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _assert_equal(x, y, f"{place}/{i}")
    else:
        assert a == b, place


@pytest.mark.parametrize("name", ["automatic", "manual"])
def test_weights_are_bit_equal_to_ddp_after_20_steps(trained: dict[str, Path], name: str) -> None:
    """BatchNorm, dropout, Adam; accumulation of 3 with an incomplete window and clipping; two optimizers by hand."""
    ddp, ours = (_load(trained[s] / f"{name}.ckpt") for s in ("ddp", "collective"))
    assert ours["global_step"] == ddp["global_step"] == {"automatic": 20, "manual": 40}[name]
    _assert_equal(ddp["state_dict"], ours["state_dict"], "state_dict")
    _assert_equal(ddp["optimizer_states"], ours["optimizer_states"], "optimizer_states")


def test_checkpoints_are_plain_lightning_files(trained: dict[str, Path]) -> None:
    ddp, ours = (_load(trained[s] / "automatic.ckpt") for s in ("ddp", "collective"))
    assert list(ddp) == list(ours)
    assert ddp["callbacks"].keys() == ours["callbacks"].keys()
    assert not [p.name for p in trained["collective"].iterdir() if p.name.endswith(".tmp")]


def test_a_checkpoint_resumes_under_the_other_strategy(trained: dict[str, Path]) -> None:
    """Same weights whichever strategy made the first half and whichever the second."""
    first_ours, first_ddp = (_load(trained[s] / "resumed.ckpt") for s in ("ddp", "collective"))
    assert first_ours["global_step"] == 20
    _assert_equal(first_ours["state_dict"], first_ddp["state_dict"], "state_dict")
    _assert_equal(first_ours["optimizer_states"], first_ddp["optimizer_states"], "optimizer_states")
