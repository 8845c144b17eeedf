"""Checkpoints behind fsspec: the same files under a URL."""

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from pieces import Pieces, same, state_of

from collective_strategy import Collective, SingleProcessCollective
from collective_strategy.checkpoints import (
    CheckpointError,
    consolidate,
    is_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from collective_strategy.checkpoints.folders import is_remote
from collective_strategy.testing import run_ranks


class Bucket(LocalFileSystem):
    """Files of a directory under a protocol of their own, which every process sees."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("bucket://"))


def saved_and_loaded(collective: Collective, url: str) -> bool:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    module = Pieces(collective)
    for k in range(2):  # the second one takes the first one's place
        state = state_of(module, step=k)
        save_checkpoint(url, state, module, collective)
    return same(load_checkpoint(url, module, collective)["state_dict"], state["state_dict"])


def test_all_ranks_write_to_a_url(tmp_path: Path) -> None:
    url = f"bucket://{tmp_path}/run/last.ckpt"
    outcomes = run_ranks(4, saved_and_loaded, url, mesh={"data": 2, "model": 2}, timeout=30)
    assert [outcome.result() for outcome in outcomes] == [True] * 4
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    assert is_checkpoint(url)
    assert sorted(os.listdir(tmp_path / "run")) == ["last.ckpt"]
    assert len([name for name in os.listdir(tmp_path / "run/last.ckpt") if name.startswith("save-")]) == 1
    remove_checkpoint(url)
    assert not is_checkpoint(url)


def save_one(url: str, value: float) -> None:
    module = torch.nn.Linear(1, 1)
    module.weight.data.fill_(value)
    save_checkpoint(url, {"state_dict": module.state_dict()}, module, SingleProcessCollective().setup())


def test_a_save_that_stops_half_way_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://half/last.ckpt"
    files: Any = fsspec.filesystem("memory")
    pipe = type(files).pipe_file

    def stops(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        if path.endswith("checkpoint.json"):
            raise OSError("the connection was lost")
        pipe(self, path, value, **kwargs)

    for before in (None, 1.0):
        if before is not None:
            save_one(url, before)
        with monkeypatch.context() as broken:
            broken.setattr(type(files), "pipe_file", stops)
            with pytest.raises(CheckpointError, match="the connection was lost"):
                save_one(url, 2.0)
        assert is_checkpoint(url) == (before is not None)
    assert consolidate(url)["weight"].item() == 1.0
    save_one(url, 3.0)
    assert consolidate(url)["weight"].item() == 3.0
    remove_checkpoint(url)


def test_files_in_the_way_are_left_alone() -> None:
    fsspec.filesystem("memory").pipe_file("memory://other/last.ckpt", b"mine")
    with pytest.raises(CheckpointError, match="There is a file at"):
        save_one("memory://other/last.ckpt", 1.0)
    fsspec.filesystem("memory").pipe_file("memory://third/last.ckpt/mine", b"mine")
    with pytest.raises(CheckpointError, match="no checkpoint of this package"):
        save_one("memory://third/last.ckpt", 1.0)


def test_local_urls_are_local(tmp_path: Path) -> None:
    assert is_remote("s3://bucket/last.ckpt")
    assert not is_remote(f"file://{tmp_path}/last.ckpt")
    save_one(f"file://{tmp_path}/last.ckpt", 1.0)
    assert consolidate(tmp_path / "last.ckpt")["weight"].item() == 1.0
