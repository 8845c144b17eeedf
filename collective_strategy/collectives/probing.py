"""What a backend of torch.distributed that we do not know can do: each operation is tried once, with one number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from collective_strategy.collectives.operations import ReduceOp

log = logging.getLogger("collective_strategy")
_DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
Operation = Callable[[], object]


@dataclass(frozen=True)
class Probed:
    """What worked.

    Args:
        operations: Names of those that take equal pieces.
        reduced: Per operation the dtypes that all_reduce took and reduced right.
        moved: The dtypes that all_gather and broadcast moved.
    """

    operations: frozenset[str]
    reduced: dict[ReduceOp, frozenset[torch.dtype]]
    moved: frozenset[torch.dtype]


def probe(
    device: torch.device,
    world_size: int,
    gather: Callable[[Tensor, Tensor], object],
    scatter: Callable[[Tensor, Tensor], object],
    ops: Mapping[ReduceOp, object],
) -> Probed:
    """Tries every operation in the default group. All ranks call it; what a backend lacks is refused on all alike.

    Args:
        device: Where the tensors are.
        world_size: Number of ranks.
        gather, scatter: torch's flat all_gather and reduce_scatter, whose names differ by version.
        ops: torch's reductions.
    """
    one = torch.ones(1, device=device)
    several = torch.ones(world_size, device=device)
    tried = {
        "all_gather": lambda: gather(several.clone(), one),
        "reduce_scatter": lambda: scatter(one.clone(), several),
        "all_to_all": lambda: dist.all_to_all_single(several.clone(), several),
        "barrier": lambda: dist.barrier(),
    }
    operations = frozenset(name for name, act in tried.items() if _works(name, act))
    expected = {ReduceOp.SUM: world_size, ReduceOp.MAX: 1, ReduceOp.MIN: 1, ReduceOp.PROD: 1}
    reduced = {
        op: frozenset(d for d in _DTYPES if _works(f"all_reduce {op.value} {d}", _reduces(device, d, ops[op], value)))
        for op, value in expected.items()
    }
    moved = frozenset(d for d in _DTYPES if _works(f"broadcast of {d}", _broadcasts(device, d)))
    return Probed(operations, reduced, moved)


def _works(name: str, act: Operation) -> bool:
    try:
        act()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        log.debug("the backend has no %s: %s", name, error)
        return False
    return True


def _reduces(device: torch.device, dtype: torch.dtype, op: object, expected: int) -> Operation:
    def act() -> None:
        x = torch.ones(1, dtype=dtype, device=device)
        work = dist.all_reduce(x, op, async_op=True)
        if work is not None:
            work.wait()
        assert x.item() == expected

    return act


def _broadcasts(device: torch.device, dtype: torch.dtype) -> Operation:
    return lambda: dist.broadcast(torch.ones(1, dtype=dtype, device=device), 0)
