"""Small modules and a scenario runner, shared by the scripts that the tests launch on real processes."""

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from launching import free_port
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from collective_strategy import CollectiveStrategy

warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*isinstance.treespec.*")
torch.set_num_threads(1)

SCENARIOS: dict[str, Callable[[], Any]] = {}


def rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def main() -> None:
    """``script.py OUT [name ...]``: runs the scenarios in order; each rank writes its results as JSON."""
    out, wanted = Path(sys.argv[1]), sys.argv[2:] or list(SCENARIOS)
    results: dict[str, Any] = {}
    for name in wanted:
        try:
            results[name] = {"value": plain(SCENARIOS[name]())}
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        (out / f"rank{rank()}.json").write_text(json.dumps(results))


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def run_forked(jobs: dict[str, Callable[[], None]], out: Path, deadline: float, at_once: int = 4) -> None:
    """Each job on two ranks that are forked from this process, which has imported everything already.

    A few at a time, because most of their time is waiting. Writes codes, seconds and the common output of each.
    """
    waiting, running, results = list(jobs), {}, {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = (time.monotonic(), _fork(jobs[name], out / f"{name}.log"), {})
        for name, (started, pids, codes) in list(running.items()):
            seconds = time.monotonic() - started
            for r, pid in enumerate(pids):
                if r not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[r] = os.waitstatus_to_exitcode(status)
                    elif seconds > deadline:
                        os.kill(pid, signal.SIGKILL)
            if len(codes) == 2:
                log = (out / f"{name}.log").read_text(errors="replace")
                results[name] = {"codes": [codes[0], codes[1]], "seconds": seconds, "ended": time.time(), "log": log}
                del running[name]
        time.sleep(0.02)
    (out / "rank0.json").write_text(json.dumps(results))


def _fork(job: Callable[[], None], path: Path) -> list[int]:
    port, pids = str(free_port()), []
    for r in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            # Lightning's own strategies need it
            os.environ["LOCAL_RANK"] = str(r)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            job()
            sys.exit(0)
        pids.append(pid)
    return pids


class Values(Dataset):
    """Item i is ``(i, values[i])``-free: just the number, so that a batch is a tensor of numbers."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(self.values[i])


class Toy(L.LightningModule):
    """loss = mean((w + u) * x), SGD lr 1: w = -(sum over steps of the mean of x over ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))
        self.u = nn.Parameter(torch.tensor(0.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.w + self.u) * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trainer(n: int = 2, strategy: Any = None, **kwargs: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": n,
        "strategy": CollectiveStrategy(timeout=60) if strategy is None else strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**settings | kwargs)


def loader(values: list[float], batch_size: int = 1, **kwargs: Any) -> DataLoader:
    return DataLoader(Values(values), batch_size=batch_size, **kwargs)


def fit(model: L.LightningModule, data: list[float] | None = None, own: list[list[float]] | None = None, **kwargs: Any):
    """Fits with single-sample batches: ``data`` is split by the sampler, ``own[rank]`` is used as it is."""
    if own is not None:
        kwargs["use_distributed_sampler"] = False
        data = own[rank()]
    assert data is not None
    t = trainer(**kwargs)
    t.fit(model, loader(data))
    return t
