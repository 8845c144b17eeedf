"""The differentiable pairs: which collective is whose gradient. Knows no backend.

A collective's gradient depends on what the ranks do with the result. If each goes on to something of its own, the
copies' gradients are contributions and are summed (*replicate*); if all repeat one computation, each already holds the
whole gradient (*invariant*). A pair (forward A, backward B) is right when B is the adjoint of A under the types in
`operations.OPERATIONS`: ``sum_r <A x, w> = sum_r <x, B w>``, divided by the number of ranks on an invariant side.
Backward calls the differentiable partner, so second derivatives are right too. The theory is that of local SPMD types
(the spmd_types package, JAX's varying and invariant values, Megatron's f and g).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from collective_strategy.collectives import transport
from collective_strategy.collectives.compiling import outside_graphs
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.reductions import divided
from collective_strategy.collectives.type_hook import Types, is_checked, type_hook, types_of, types_of_gradient

Raw = Callable[..., Tensor]
Differentiable = Callable[..., Tensor]


def _pair(name: str, forward: Raw, backward: Differentiable, types: Types | None = None) -> Differentiable:
    """One autograd Function ``f(collective, x, *settings)``, given forward and backward of the same form.

    Every forward here is linear in x, so the directional derivative (forward-mode AD) is the forward itself. The types
    are those of the operation of that name, unless given.
    """

    class Function(torch.autograd.Function):
        spmd_typecheck = staticmethod(type_hook(types or types_of(name)))

        @staticmethod
        def forward(x: Tensor, collective: Any, settings: tuple[Any, ...]) -> Tensor:
            return forward(collective, x, *settings)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, ctx.collective, ctx.settings = inputs
            ctx.call = ctx.collective._calls

        @staticmethod
        @outside_graphs
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
            with ctx.collective._backward_of(name, ctx.call):
                return backward(ctx.collective, gradients[0], *ctx.settings), None, None

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Tensor:
            return apply(ctx.collective, tangents[0], *ctx.settings)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
            raise NotImplementedError(
                f"{name} under torch.vmap is refused: the ranks may map over different sizes, and wait. "
                "Call the collective outside vmap, on the whole batch."
            )

    Function.__name__ = Function.__qualname__ = name

    def apply(collective: Any, x: Tensor, *settings: Any) -> Tensor:
        if (torch.is_grad_enabled() and x.requires_grad) or _transformed() or is_checked():
            collective._root._differentiated = True
            result: Tensor = Function.apply(x, collective, settings)
            return result
        return forward(collective, x, *settings)

    return apply


def _transformed() -> bool:
    """Whether a functorch transform or forward-mode AD is active, which the raw operations would not see."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _copy(collective: Any, x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _divided(collective: Any, x: Tensor) -> Tensor:
    return divided(x.detach(), collective.world_size)


def _at_root(collective: Any, x: Tensor, root: int) -> Tensor:
    return x.detach().clone() if collective.rank == root else torch.zeros_like(x)


def _sum_at_root(collective: Any, x: Tensor, root: int) -> Tensor:
    return _at_root(collective, transport.all_reduce(collective, x, ReduceOp.SUM), root)


def _shifted_pairs(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple((target, source) for source, target in pairs)


def _gathered_at_root(collective: Any, x: Tensor, src: int, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return _at_root(collective, transport.all_gather_cat(collective, x, dim, sizes), src)


def _own_of_root(collective: Any, x: Tensor, src: int, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return transport.scatter(collective, x, src, dim, sizes)


# partial -> replicate | partial -> replicate, for op sum and mean
all_reduce_replicate: Differentiable = _pair(
    "all_reduce(to='replicate')", transport.all_reduce, lambda c, g, op: all_reduce_replicate(c, g, op)
)
# partial -> invariant | invariant -> replicate
all_reduce_invariant: Differentiable = _pair(
    "all_reduce(to='invariant')",
    transport.all_reduce,
    lambda c, g, op: replicate(c, g) if op is ReduceOp.SUM else divided_replicate(c, g),
)
# invariant -> replicate | partial -> invariant
replicate: Differentiable = _pair("replicate", _copy, lambda c, g: all_reduce_invariant(c, g, ReduceOp.SUM))
divided_replicate: Differentiable = _pair(
    "replicate of the mean",
    _divided,
    lambda c, g: all_reduce_invariant(c, g, ReduceOp.MEAN),
    types=types_of_gradient("all_reduce(to='invariant')"),
)
# varying -> replicate | partial -> varying, along a dim
all_gather_replicate: Differentiable = _pair(
    "all_gather(to='replicate')",
    transport.all_gather_cat,
    lambda c, g, dim, sizes: reduce_scatter(c, g, ReduceOp.SUM, dim, sizes),
)
# varying -> invariant | invariant -> varying
all_gather_invariant: Differentiable = _pair(
    "all_gather(to='invariant')", transport.all_gather_cat, lambda c, g, dim, sizes: shard_invariant(c, g, dim, sizes)
)
# partial -> varying | varying -> replicate, for op sum and mean
reduce_scatter: Differentiable = _pair(
    "reduce_scatter",
    transport.reduce_scatter,
    lambda c, g, op, dim, sizes: all_gather_replicate(
        c, g if op is ReduceOp.SUM else divided(g, c.world_size), dim, sizes
    ),
)
# invariant -> varying | varying -> invariant
shard_invariant: Differentiable = _pair(
    "shard(of='invariant')", transport.own_chunk, lambda c, g, dim, sizes: all_gather_invariant(c, g, dim, sizes)
)
# replicate -> varying | varying -> partial
shard_replicate: Differentiable = _pair(
    "shard(of='replicate')", transport.own_chunk, lambda c, g, dim, sizes: in_zeros(c, g, dim, sizes)
)
in_zeros: Differentiable = _pair(
    "zeros around own chunk",
    transport.own_chunk_in_zeros,
    lambda c, g, dim, sizes: shard_replicate(c, g, dim, sizes),
    types=types_of_gradient("shard(of='replicate')"),
)
# replicate -> partial, its own gradient: one rank keeps the value, so that the ranks' sum is the value
kept_by_first: Differentiable = _pair(
    "replicate to partial",
    lambda c, x: _at_root(c, x, 0),
    lambda c, g: kept_by_first(c, g),
    types=("replicate", "partial"),
)
# varying -> varying
all_to_all: Differentiable = _pair(
    "all_to_all",
    lambda c, x, split_dim, concat_dim, out, into: transport.all_to_all(
        c, x, split_dim, concat_dim, out, transport.received_shapes(x, split_dim, concat_dim, out[c.rank], into)
    ),
    lambda c, g, split_dim, concat_dim, out, into: all_to_all(c, g, concat_dim, split_dim, into, out),
)
permute: Differentiable = _pair("permute", transport.permute, lambda c, g, pairs: permute(c, g, _shifted_pairs(pairs)))
# varying -> varying
halo_exchange: Differentiable = _pair(
    "halo_exchange", transport.halo_exchange, lambda c, g, *settings: folded_halo(c, g, *settings)
)
folded_halo: Differentiable = _pair(
    "borders added to their owners'",
    transport.folded_halo,
    lambda c, g, *settings: halo_exchange(c, g, *settings),
    types=types_of_gradient("halo_exchange"),
)
# varying -> replicate | partial -> varying
broadcast_replicate: Differentiable = _pair(
    "broadcast(to='replicate')", transport.broadcast, lambda c, g, src: sum_at_root(c, g, src)
)
sum_at_root: Differentiable = _pair(
    "sum at src",
    _sum_at_root,
    lambda c, g, src: broadcast_replicate(c, g, src),
    types=types_of_gradient("broadcast(to='replicate')"),
)
# varying -> invariant | invariant -> varying
broadcast_invariant: Differentiable = _pair(
    "broadcast(to='invariant')", transport.broadcast, lambda c, g, src: at_root(c, g, src)
)
at_root: Differentiable = _pair(
    "own gradient at src",
    _at_root,
    lambda c, g, src: broadcast_invariant(c, g, src),
    types=types_of_gradient("broadcast(to='invariant')"),
)
# varying -> varying
scatter: Differentiable = _pair(
    "scatter", _own_of_root, lambda c, g, src, dim, sizes: gathered_at_root(c, g, src, dim, sizes)
)
gathered_at_root: Differentiable = _pair(
    "chunks gathered at src",
    _gathered_at_root,
    lambda c, g, src, dim, sizes: scatter(c, g, src, dim, sizes),
    types=types_of_gradient("scatter"),
)
