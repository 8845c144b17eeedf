"""Calls too early, too late, by one rank only, or that met another operation: hangs and low-level texts."""

import subprocess
import sys
import time

import pytest
import torch
from on_ranks import error_of, errors, values

from collective_strategy import init
from collective_strategy.collectives import Collective, TorchDistributedCollective
from collective_strategy.testing import run_ranks


def test_a_call_before_set_up_says_what_to_call_first() -> None:
    """Lightning #20690, Lightning #17546, Lightning #5122."""
    c = TorchDistributedCollective(mesh={"data": -1, "model": 2})
    kind, text = error_of(lambda: c.all_gather(torch.ones(1)))
    assert kind == "CollectiveStateError"
    assert "setup()" in text
    assert "configure_model()" in text
    assert not torch.distributed.is_initialized()


def test_importing_and_constructing_load_no_backend_and_no_lightning() -> None:
    code = (
        "import sys; import collective_strategy.collectives as c; c.TorchDistributedCollective(timeout=3);"
        "loaded = {name.partition('.')[0] for name in sys.modules};"
        "assert not loaded & {'lightning', 'pytorch_lightning', 'horovod', 'torch_xla'}, loaded;"
        "import torch.distributed as d; assert not d.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tear_down_and_set_up_again_in_the_same_processes() -> None:
    """pytorch #55967, pytorch #74666, pytorch #114585."""

    def again(_: None) -> list:
        found: list = []
        for _attempt in range(3):
            c = init(mesh={"data": -1, "model": 2}, timeout=20)
            found.append((c.reduce(torch.ones(1), "sum").item(), c["model"].all_gather_object(c.rank)))
            c.teardown()
            found.append(error_of(c.barrier)[0])
            c.teardown()
        return found

    for rank, found in enumerate(values(4, again, backend=None)):
        assert found == [(4.0, [0, 1] if rank < 2 else [2, 3]), "CollectiveStateError"] * 3


def test_a_call_by_one_rank_only_ends_and_names_the_operation_and_the_rank() -> None:
    """Lightning #16541, horovod #2640."""

    def only_first(c: Collective) -> tuple[tuple[str, str] | None, float]:
        began = time.monotonic()
        if c.rank == 0:
            return error_of(lambda: c.all_gather(torch.ones(1))), time.monotonic() - began
        time.sleep(5)
        return None, 0.0

    (error, waited), _ = values(2, only_first, timeout=2)
    assert error is not None
    kind, text = error
    assert kind == "CollectiveTimeoutError"
    assert "all_gather" in text
    assert "rank 1" in text
    assert 1.5 < waited < 4.5


def test_different_operations_that_meet_are_both_named() -> None:
    """speechbrain #2401, Lightning #19045, Lightning #19680."""

    def meet(c: Collective) -> tuple[tuple[str, str], float]:
        x = torch.ones(2)
        error = error_of(lambda: c.reduce(x, "sum") if c.rank == 0 else c.broadcast(x, src=1))
        return error, c.all_reduce(1.0).item()

    first, second = values(2, meet)
    assert first == second
    (kind, text), after = first
    assert kind == "CollectiveMismatchError"
    assert "rank 0: reduce" in text
    assert "rank 1: broadcast" in text
    assert after == 2.0


def test_different_operations_without_check_mode_end_within_the_time_out() -> None:
    def meet(c: Collective) -> None:
        c.barrier() if c.rank == 0 else c.all_gather_object("x" * 1000)

    outcomes = run_ranks(2, meet, check=False, timeout=2, fresh=True)
    assert all(outcome.error is not None for outcome in outcomes)


def test_a_rank_that_raised_does_not_leave_the_others_waiting() -> None:
    def one_fails(c: Collective) -> None:
        if c.rank == 1:
            raise RuntimeError("no more disk")
        c.all_reduce(torch.ones(1))

    began = time.monotonic()
    first, second = errors(2, one_fails, check=False)
    assert str(second) == "no more disk"
    assert "all_reduce" in str(first)
    assert time.monotonic() - began < 8


def test_a_rank_whose_process_ended_does_not_leave_the_others_waiting() -> None:
    def one_dies(c: Collective) -> None:
        c.barrier()
        if c.rank == 1:
            import os

            os._exit(3)
        c.all_reduce(torch.ones(1))

    first, second = errors(2, one_dies, timeout=3, fresh=True)
    assert "exit code 3" in str(second)
    assert "all_reduce" in str(first)


@pytest.mark.parametrize("check", [True, False])
def test_a_backward_that_one_rank_skips_is_named(check: bool) -> None:
    def backward(c: Collective) -> tuple[str, str] | None:
        x = torch.ones(2, requires_grad=True)
        loss = c.all_gather(x).sum()
        if c.rank == 0:
            return error_of(loss.backward)
        time.sleep(4)
        return None

    (error, _) = values(2, backward, timeout=2, check=check)
    assert error is not None
    kind, text = error
    assert kind == "CollectiveTimeoutError"
    assert "backward of all_gather" in text
