"""How a reduction travels: which dtype and operation reach the backend, and how the result comes back.

Rules that hold on every backend: float16 and bfloat16 are reduced in float32; the mean of integers and bools is
floating; max and min propagate NaN and order -0.0 below 0.0, which backends do not do alike, so floats are compared as
order-preserving integers; narrow and unsigned integers are widened where the backend lacks them, which changes no
result that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from collective_strategy.collectives.capabilities import Capabilities
from collective_strategy.collectives.operations import ReduceOp

_INTEGER_OPS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_ORDER_OPS = (ReduceOp.MAX, ReduceOp.MIN)
_WIDER = {
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.int32: torch.int64,
    torch.uint32: torch.int64,
}
_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Reduction:
    """A reduction on its way.

    ``buffer`` is contiguous and may be overwritten; ``wire_op`` is what the backend is asked for, None where the
    tensors must be gathered and folded; ``finish`` turns the reduced buffer into the result.
    """

    buffer: Tensor
    op: ReduceOp
    wire_op: ReduceOp | None
    finish: Callable[[Tensor], Tensor]

    def fold(self, stacked: Tensor) -> Tensor:
        """Reduces along the first dim on this rank."""
        return fold(stacked, self.op)


def refuse_reduction(op: ReduceOp, dtype: torch.dtype, path: str, operation: str) -> None:
    """Refuses pairs of operation and dtype that have no meaning, alike on every backend.

    Raises:
        TypeError: naming operation, dtype and what to do.
    """

    def refused(why: str) -> TypeError:
        name = str(dtype).removeprefix("torch.")
        return TypeError(f"{operation}(op={op.value!r}) of {path} with dtype {name} is refused: {why}")

    if dtype.is_complex and op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise refused("complex numbers can be summed and averaged only; reduce .abs() or torch.view_as_real() instead.")
    if op in _INTEGER_OPS and (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
        raise refused("bitwise reductions are for integers; use 'all' or 'any' for bools.")
    if op in (ReduceOp.ALL, ReduceOp.ANY) and dtype is not torch.bool:
        raise refused("'all' and 'any' are for bools; compare first, for example x != 0.")
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PROD):
        raise refused("the result would be a bool, not a count; use x.long() to count, or 'any' and 'all'.")


def encode_reduction(x: Tensor, op: ReduceOp, world_size: int, capabilities: Capabilities) -> Reduction:
    """Prepares a contiguous detached tensor for the backend; never shares memory with ``x``."""
    dtype = x.dtype
    finish: Callable[[Tensor], Tensor]
    wire_op = op
    if op is ReduceOp.MEAN:
        wire_op = ReduceOp.SUM
        if dtype.is_floating_point or dtype.is_complex:
            buffer, narrow = _summable(x)
            finish = lambda y: narrow(y / world_size)  # noqa: E731
        else:
            default = torch.get_default_dtype()
            buffer, total = _halves(x) if dtype.itemsize == 8 else (x.to(torch.int64), _double)
            finish = lambda y: (total(y) / world_size).to(default)  # noqa: E731
    elif op in (ReduceOp.ALL, ReduceOp.ANY) or dtype is torch.bool:
        wire_op = ReduceOp.MIN if op in (ReduceOp.ALL, ReduceOp.MIN) else ReduceOp.MAX
        buffer, finish = x.to(torch.uint8), lambda y: y.to(torch.bool)
    elif dtype.is_complex or (dtype.is_floating_point and op not in _ORDER_OPS):
        buffer, finish = _summable(x)
    elif dtype.is_floating_point:
        buffer, finish = _ordered(x, op)
    elif dtype is torch.uint64:
        buffer, finish = _signed(x, op)
    else:
        buffer, finish = x, _same
    if not (dtype.is_floating_point or dtype.is_complex):
        buffer, finish = _widened(buffer, wire_op, finish, capabilities)
    if buffer.data_ptr() == x.data_ptr():
        buffer = buffer.clone()
    supported = capabilities.reduces(wire_op, buffer.dtype)
    return Reduction(buffer, wire_op, wire_op if supported else None, finish)


def divided(x: Tensor, count: int) -> Tensor:
    """``x / count``; differentiable. Complex numbers as pairs: torch_xla calls their quotient a real tensor."""
    if x.is_complex():
        return torch.view_as_complex(torch.view_as_real(x.resolve_conj()) / count)
    return x / count


def fold(stacked: Tensor, op: ReduceOp) -> Tensor:
    """Reduces along the first dim, in rank order."""
    if op is ReduceOp.SUM:
        return stacked.sum(0, dtype=stacked.dtype)
    if op is ReduceOp.PROD:
        return stacked.prod(0, dtype=stacked.dtype)
    if op is ReduceOp.MAX:
        return stacked.amax(0)
    if op is ReduceOp.MIN:
        return stacked.amin(0)
    bitwise = {
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    return reduce(bitwise, stacked.unbind(0))


def _summable(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    dtype = x.dtype
    if dtype.is_complex:
        wide = torch.complex64 if dtype is torch.complex32 else dtype
        return torch.view_as_real(x.to(wide)), lambda y: torch.view_as_complex(y).to(dtype)
    if dtype.itemsize < 4:
        return x.to(torch.float32), lambda y: y.to(dtype)
    return x, _same


def _ordered(x: Tensor, op: ReduceOp) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Floats as integers of the same order, NaN above (max) or below (min) everything."""
    dtype = x.dtype
    wide = x.to(torch.float32) if dtype.itemsize < 4 else x
    integer = _INTEGER_OF_WIDTH[wide.dtype.itemsize]
    limits = torch.iinfo(integer)
    nan = limits.max if op is ReduceOp.MAX else limits.min
    bits = wide.view(integer)
    keys = torch.where(bits < 0, bits ^ limits.max, bits).masked_fill(wide.isnan(), nan)

    def finish(reduced: Tensor) -> Tensor:
        values = torch.where(reduced < 0, reduced ^ limits.max, reduced).view(wide.dtype)
        return values.masked_fill(reduced == nan, float("nan")).to(dtype)

    return keys, finish


def _signed(x: Tensor, op: ReduceOp) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """uint64 as int64: the same bits for sums and products (arithmetic is modular), shifted for comparisons."""
    if op not in _ORDER_OPS:
        return x.view(torch.int64), lambda y: y.view(torch.uint64)
    lowest = torch.iinfo(torch.int64).min
    return x.view(torch.int64) ^ lowest, lambda y: (y ^ lowest).view(torch.uint64)


def _widened(
    buffer: Tensor,
    op: ReduceOp,
    finish: Callable[[Tensor], Tensor],
    capabilities: Capabilities,
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    narrow = buffer.dtype
    wide = narrow
    while not capabilities.reduces(op, wide) and wide in _WIDER:
        wide = _WIDER[wide]
    if wide is narrow:
        return buffer, finish
    if not capabilities.reduces(op, wide) and narrow not in (torch.uint16, torch.uint32):
        return buffer, finish  # it will be gathered and folded, which needs no widening
    return buffer.to(wide), lambda y: finish(y.to(narrow))


def _halves(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """64-bit integers as upper and lower half, along a new last dim: the sum cannot overflow, and is rounded once."""
    bits = x.view(torch.int64)
    upper = bits >> 32 if x.dtype is torch.int64 else (bits >> 32) & 0xFFFFFFFF
    halves = torch.stack([upper, bits & 0xFFFFFFFF], -1)
    return halves, lambda y: y[..., 0].to(torch.float64) * 2.0**32 + y[..., 1].to(torch.float64)


def _double(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _same(x: Tensor) -> Tensor:
    return x
