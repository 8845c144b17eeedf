"""Launching: ``part_d.py OUT NAME``."""

import os
from typing import Any

import torch
from toys import Toy, fit, main, scenario, trainer

from collective_strategy import CollectiveStrategy


@scenario
def job_number() -> Any:
    """The largest job number that this job's ranks see is their own."""
    t = fit(Toy(), [1.0, 2.0])
    job = torch.tensor(int(os.environ["JOB_NUMBER"]))
    return [t.strategy.reduce(job, reduce_op="max"), t.world_size, os.environ["MASTER_PORT"]]


@scenario
def places() -> Any:
    t = fit(Toy(), [1.0, 2.0])
    s = t.strategy
    return [t.lightning_module.w, s.global_rank, s.local_rank, s.node_rank, s.world_size, os.environ.get("LOCAL_RANK")]


@scenario
def short_timeout() -> Any:
    trainer(strategy=CollectiveStrategy(timeout=3)).fit(Toy(), [torch.ones(1)])


if __name__ == "__main__":
    main()
