"""Gathers of tensors whose shapes differ by rank: the shapes are exchanged first, the data travels flat."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collective_strategy.collectives import transport
from collective_strategy.collectives.errors import CollectiveMismatchError
from collective_strategy.collectives.trees import describe_tensor

if TYPE_CHECKING:
    from collective_strategy.collectives.base import CollectiveBase
    from collective_strategy.collectives.trees import Tree

_MOST_DIMS = 14
_DTYPES = tuple(
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ]
    if hasattr(torch, name)
)


def all_gather(
    collective: Any, x: Tensor, dim: int | None, sizes: tuple[int, ...] | None, pair: Callable[..., Tensor]
) -> list[Tensor] | Tensor:
    """Exact pieces in rank order, or their concatenation along ``dim``."""
    if sizes is not None:
        along = 0 if dim is None else dim
        joined = pair(collective, x, along, sizes)
        return joined if dim is not None else list(_pieces(joined, sizes))
    shapes = exchange_shapes(collective, x)
    if dim is not None:
        _refuse_other_dims(shapes, dim)
        return pair(collective, x, dim, tuple(shape[dim] for shape in shapes))
    numels = tuple(transport._numel(shape) for shape in shapes)
    flat = pair(collective, x.reshape(-1), 0, numels)
    return [piece.reshape(shape) for piece, shape in zip(_pieces(flat, numels), shapes, strict=True)]


def gather(collective: Any, x: Tensor, dst: int, dim: int | None) -> list[Tensor] | Tensor | None:
    """As `all_gather` on rank ``dst``, None elsewhere."""
    shapes = exchange_shapes(collective, x)
    if dim is not None:
        _refuse_other_dims(shapes, dim)
    numels = [transport._numel(shape) for shape in shapes]
    flat = transport._outbound(collective, x).reshape(-1)
    here = collective.rank == dst
    out = [flat.numel() if peer == dst else 0 for peer in range(collective.world_size)]
    received = transport.exchange(collective, flat, out, numels if here else [0] * collective.world_size)
    if not here:
        return None
    pieces = [piece.reshape(shape).to(x.device) for piece, shape in zip(_pieces(received, numels), shapes, strict=True)]
    return pieces if dim is None else torch.cat(pieces, dim)


def exchange_shapes(collective: Any, x: Tensor) -> list[tuple[int, ...]]:
    """Every rank's shape.

    Raises:
        CollectiveMismatchError: dtypes or numbers of dims differ; alike on all ranks.
    """
    table = transport.all_gather(collective, _header(x)).tolist()
    dtypes = [_DTYPES[row[0]] for row in table]
    if len(set(dtypes)) > 1:
        raise CollectiveMismatchError(
            f"ragged gather: the ranks' dtypes differ: {_by_rank(dtypes)}. Convert them first."
        )
    shapes = [tuple(row[2 : 2 + row[1]]) for row in table]
    if len({len(shape) for shape in shapes}) > 1:
        raise CollectiveMismatchError(
            f"ragged gather: the ranks' tensors have different numbers of dims: {_by_rank(shapes)}. Lengths may "
            "differ, the number of dims may not; reshape them, or gather objects."
        )
    return shapes


def send(collective: Any, x: Tensor, dst: int) -> Tensor:
    """Sends a tensor after its dtype and shape."""
    transport.send(collective, _header(x), dst)
    return transport.send(collective, x, dst)


def recv(collective: Any, like: Tensor, src: int) -> Tensor:
    """Receives a tensor of the dtype and shape of ``like``; what else was sent is taken off the wire and refused."""
    row = transport.recv(collective, _header(like), src).tolist()
    dtype, shape = _DTYPES[row[0]], tuple(row[2 : 2 + row[1]])
    received = transport.recv(collective, torch.empty(shape, dtype=dtype, device=like.device), src)
    if dtype != like.dtype or shape != tuple(like.shape):
        raise CollectiveMismatchError(
            f"recv: rank {src} sent {describe_tensor(received)}, but rank {collective.rank} expects "
            f"{describe_tensor(like)}. Give recv() a tensor of the shape and dtype that is sent."
        )
    return received


def _header(x: Tensor) -> Tensor:
    if x.ndim > _MOST_DIMS:
        raise ValueError(f"tensors of more than {_MOST_DIMS} dims cannot be described to other ranks, got {x.ndim}.")
    return torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape, *[0] * (_MOST_DIMS - x.ndim)], dtype=torch.int64)


def check_own_sizes(
    collective: CollectiveBase, tree: Tree, dims: Sequence[tuple[int | None]], sizes: tuple[int, ...]
) -> None:
    """``sizes`` must say the truth about this rank's tensors."""
    for (leaf, path), (dim,) in zip(tree.named(), dims, strict=True):
        along = dim or 0
        if leaf.ndim == 0:
            raise ValueError(f"all_gather(sizes=...): {path} has no dims.")
        if leaf.shape[along] != sizes[collective.rank]:
            raise ValueError(
                f"all_gather: sizes {list(sizes)} say that rank {collective.rank} has {sizes[collective.rank]} "
                f"entries along dim "
                f"{along}, but {path} has shape {list(leaf.shape)}."
            )


def exchange_details(cuts: Sequence[tuple[int, int, tuple[int, ...], tuple[int, ...]]]) -> str:
    """What each rank sends and expects in an all_to_all, for the comparison in check mode."""
    return json.dumps([[at == onto, out, into] for at, onto, out, into in cuts])


def verify_exchange(details: Sequence[str]) -> str | None:
    """What is wrong with the ranks' sizes of an all_to_all, or None."""
    ranks = [json.loads(text) for text in details]
    for index in range(len(ranks[0])):
        for source, cuts in enumerate(ranks):
            for target in range(len(ranks)):
                same_dim, out, _ = cuts[index]
                expected = ranks[target][index][2][source]
                if same_dim and out[target] != expected:
                    return f"rank {source} sends {out[target]} entries to rank {target}, which expects {expected}"
                if not same_dim and (out != ranks[target][index][1] or cuts[index][2] != ranks[target][index][2]):
                    theirs = ranks[target][index][1:]
                    return f"ranks {source} and {target} give different sizes: {cuts[index][1:]} and {theirs}"
    return None


def _pieces(joined: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    start, result = 0, []
    for size in sizes:  # narrow, not split: views of one split cannot be changed in place under autograd
        result.append(joined.narrow(0, start, size))
        start += size
    return result


def _refuse_other_dims(shapes: Sequence[tuple[int, ...]], dim: int) -> None:
    if not shapes[0]:
        raise CollectiveMismatchError(f"ragged gather: tensors without dims cannot be concatenated along dim {dim}.")
    others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(others) > 1:
        raise CollectiveMismatchError(
            f"ragged gather along dim {dim}: the shapes differ in other dims too: {_by_rank(shapes)}. Use dim=None "
            "for the list of exact pieces."
        )


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank}: {str(value).removeprefix('torch.')}" for rank, value in enumerate(values))
