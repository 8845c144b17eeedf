"""Every differentiable pair as a linear map on the list of all ranks' values, and its adjoint, written in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collective_strategy.collectives import Collective
from collective_strategy.collectives.operations import SpmdType, operation

Values = list[Any]  # of arrays


@dataclass(frozen=True)
class Case:
    """One call of a pair.

    Args:
        operation, key: The row of `OPERATIONS` and the pair in it.
        label: Says which arguments.
        call: The operation, on this rank's tensor.
        shapes: Of the input, by rank.
        forward, backward: The map from all ranks' values to all ranks' results, and its adjoint under the pair's types.
    """

    operation: str
    key: str
    label: str
    call: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    forward: Callable[..., Values]
    backward: Callable[..., Values]

    @property
    def name(self) -> str:
        """For messages."""
        return " ".join(word for word in (self.operation, self.key, self.label) if word)

    @property
    def types(self) -> tuple[SpmdType, SpmdType]:
        """Types of input and output."""
        row = operation("all_reduce" if self.operation == "reduce" else self.operation)
        pair = dict(row.pairs)[self.key]
        return pair.source, pair.destination


def sampled(kind: SpmdType, shapes: Sequence[tuple[int, ...]], seed: int, cotangent: bool = False) -> Values:
    """All ranks' values of a type, equal where the type says so; or their cotangents."""
    equal = kind in (("invariant", "partial") if cotangent else ("replicate", "invariant"))
    return [
        np.random.default_rng([seed, 0 if equal else 1 + rank, int(cotangent)]).standard_normal(shape)
        for rank, shape in enumerate(shapes)
    ]


def product(kind: SpmdType, left: Values, right: Values) -> float:
    """The inner product of values and cotangents of a type over all ranks."""
    total = sum(float(np.sum(a * b)) for a, b in zip(left, right, strict=True))
    return total / len(left) if kind == "invariant" else total


def cases(c: Collective) -> Iterator[Case]:
    """All pairs with several arguments each, for this collective."""
    n = c.world_size
    call: Callable[..., Any]
    back: Callable[..., Any]
    yield from _reductions(c)
    yield from _along_a_dim(c)
    yield from _exchanges(c)
    ring = [(k, (k + 1) % n) for k in range(n)]
    swapped = [(k, n - 1 - k) for k in range(n)]
    flat = [(2, 3)] * n
    for label, pairs in (("ring", ring), ("open chain", ring[:-1]), ("mirror", swapped), ("nobody", [])):
        there, back = _moved(pairs), _moved([(b, a) for a, b in pairs])
        yield Case("permute", "", label, lambda x, p=pairs: c.permute(x, p), flat, there, back)
    for offset, wrap in ((1, True), (-1, True), (1, False), (2, True)):
        pairs = [(k, (k + offset) % n) for k in range(n) if wrap or 0 <= k + offset < n]
        there, back = _moved(pairs), _moved([(b, a) for a, b in pairs])
        call = lambda x, o=offset, w=wrap: c.shift(x, o, w)  # noqa: E731
        yield Case("shift", "", f"by {offset}, wrap {wrap}", call, flat, there, back)
    for src in {0, n - 1}:
        copies = lambda xs, s=src: [xs[s]] * n  # noqa: E731
        call = lambda x, s=src: c.broadcast(x, s, to="replicate")  # noqa: E731
        back = lambda ws, s=src: [_sum(ws) if k == s else 0 * ws[k] for k in range(n)]  # noqa: E731
        yield Case("broadcast", "replicate", f"from {src}", call, flat, copies, back)
        call = lambda x, s=src: c.broadcast(x, s, to="invariant")  # noqa: E731
        back = lambda ws, s=src: [ws[k] if k == s else 0 * ws[k] for k in range(n)]  # noqa: E731
        yield Case("broadcast", "invariant", f"from {src}", call, flat, copies, back)


def _reductions(c: Collective) -> Iterator[Case]:
    n = c.world_size
    for method in ("all_reduce", "reduce"):
        for op, scale in (("sum", 1.0), ("mean", 1.0 / n)):
            for shape in ((4, 3), ()):
                method_of = getattr(c, method)
                total = lambda xs, f=scale: [f * _sum(xs)] * n  # noqa: E731
                scaled = lambda ws, f=scale: [f * w for w in ws]  # noqa: E731
                for to, back in (("replicate", total), ("invariant", scaled)):
                    call = lambda x, f=method_of, o=op, t=to: f(x, o, to=t)  # noqa: E731
                    yield Case(method, to, f"{op} {shape}", call, [shape] * n, total, back)
    yield Case("replicate", "", "", c.replicate, [(4, 3)] * n, list, lambda ws: [_sum(ws)] * n)


def _along_a_dim(c: Collective) -> Iterator[Case]:
    n = c.world_size
    stacked = lambda xs: [np.stack(xs)] * n  # noqa: E731
    yield Case("all_gather", "replicate", "stacked", lambda x: c.all_gather(x, to="replicate"), [(2, 3)] * n, stacked,
               lambda ws: list(_sum(ws)))  # fmt: skip
    yield Case("all_gather", "invariant", "stacked", lambda x: c.all_gather(x, to="invariant"), [(2, 3)] * n, stacked,
               lambda ws: [w[k] for k, w in enumerate(ws)])  # fmt: skip
    yield Case("all_gather", "replicate", "stacked 0-dim", lambda x: c.all_gather(x, to="replicate"), [()] * n, stacked,
               lambda ws: list(_sum(ws)))  # fmt: skip
    numels = [(k + 1) * (4 - k) for k in range(n)]
    flat = lambda x: torch.cat([piece.reshape(-1) for piece in c.all_gather(x, ragged=True, to="replicate")])  # noqa: E731
    yield Case("all_gather", "replicate", "list of uneven pieces", flat, [(k + 1, 4 - k) for k in range(n)],
               lambda xs: [np.concatenate([x.reshape(-1) for x in xs])] * n,
               lambda ws: [part.reshape(k + 1, 4 - k) for k, part in enumerate(_cut(_sum(ws), numels, 0))])  # fmt: skip
    for label, sizes in (
        ("even", [2] * n),
        ("uneven", [k + 1 for k in range(n)]),
        ("with empty", [3 * (k % 2) for k in range(n)]),
    ):
        for dim in (0, 1, -1):
            yield from _one_cut(c, f"{label} dim {dim}", sizes, dim)


def _one_cut(c: Collective, label: str, sizes: list[int], dim: int) -> Iterator[Case]:
    n = c.world_size
    at = dim % 3

    def shape(length: int) -> tuple[int, ...]:
        return tuple(length if k == at else 2 + k for k in range(3))

    mine, full = [shape(size) for size in sizes], [shape(sum(sizes))] * n
    joined = lambda xs: [np.concatenate(xs, at)] * n  # noqa: E731
    own = lambda xs: [_cut(x, sizes, at)[k] for k, x in enumerate(xs)]  # noqa: E731
    even = len(set(sizes)) == 1
    given: dict[str, Any] = {} if even else {"sizes": sizes}
    for to in ("replicate", "invariant"):
        back = (lambda ws: _cut(_sum(ws), sizes, at)) if to == "replicate" else own
        yield Case("all_gather", to, label, lambda x, t=to: c.all_gather(x, dim, to=t, **given), mine, joined, back)
        if not even:
            call = lambda x, t=to: c.all_gather(x, dim, ragged=True, to=t)  # noqa: E731
            yield Case("all_gather", to, f"{label}, sizes exchanged", call, mine, joined, back)
    for op, scale in (("sum", 1.0), ("mean", 1.0 / n)):
        yield Case("reduce_scatter", "", f"{op} {label}", lambda x, o=op: c.reduce_scatter(x, o, dim, **given), full,
                   lambda xs, f=scale: [f * part for part in _cut(_sum(xs), sizes, at)],
                   lambda ws, f=scale: [f * np.concatenate(ws, at)] * n)  # fmt: skip
    yield Case("shard", "invariant", label, lambda x: c.shard(x, dim, **given), full, own, joined)
    yield Case("shard", "replicate", label, lambda x: c.shard(x, dim, of="replicate", **given), full, own,
               lambda ws: [_in_zeros(w, k, sizes, at) for k, w in enumerate(ws)])  # fmt: skip
    for src in {0, n - 1}:
        yield Case("scatter", "", f"{label} from {src}", lambda x, s=src: c.scatter(x, s, dim, **given), full,
                   lambda xs, s=src: _cut(xs[s], sizes, at),
                   lambda ws, s=src: [np.concatenate(ws, at) * (k == s) for k in range(n)])  # fmt: skip


def _exchanges(c: Collective) -> Iterator[Case]:
    n, rank = c.world_size, c.rank
    for split_dim, concat_dim in ((0, 0), (0, 1), (1, 0), (-1, 1)):
        shape = (2 * n, 3 * n)
        there = lambda xs, s=split_dim, t=concat_dim: _exchanged(xs, [[xs[0].shape[s] // n] * n] * n, s, t)  # noqa: E731
        back = lambda ws, s=split_dim, t=concat_dim: _exchanged(ws, [[ws[0].shape[t] // n] * n] * n, t, s)  # noqa: E731
        call = lambda x, s=split_dim, t=concat_dim: c.all_to_all(x, s, t)  # noqa: E731
        yield Case("all_to_all", "", f"{split_dim} to {concat_dim}", call, [shape] * n, there, back)
    for label, (before, after), wrap in (
        ("zeros outside", (1, 1), False),
        ("periodic", (1, 1), True),
        ("one side", (2, 0), False),
        ("uneven", (1, 2), True),
    ):
        lengths = [2 + k % 2 for k in range(n)]
        yield Case("halo_exchange", "", label, lambda x, w=(before, after), p=wrap: c.halo_exchange(x, 1, w, wrap=p),
                   [(2, length) for length in lengths],
                   lambda xs, b=before, a=after, p=wrap: _with_borders(xs, b, a, p),
                   lambda ws, b=before, a=after, p=wrap: _borders_added(ws, b, a, p))  # fmt: skip
    sent = [[(source + 2 * target) % 3 for target in range(n)] for source in range(n)]
    received = [list(column) for column in zip(*sent, strict=True)]
    yield Case("all_to_all", "", "uneven", lambda x: c.all_to_all(x, sizes=(sent[rank], received[rank])),
               [(sum(row), 2) for row in sent], lambda xs: _exchanged(xs, sent, 0, 0),
               lambda ws: _exchanged(ws, received, 0, 0))  # fmt: skip
    out, into = [1 + k for k in range(n)], [2 * k % 3 + 1 for k in range(n)]
    yield Case("all_to_all", "", "uneven, two dims", lambda x: c.all_to_all(x, 0, 1, sizes=(out, into)),
               [(sum(out), into[k]) for k in range(n)], lambda xs: _exchanged(xs, [out] * n, 0, 1),
               lambda ws: _exchanged(ws, [into] * n, 1, 0))  # fmt: skip


def _sum(values: Values) -> np.ndarray:
    return np.sum(np.stack(values), axis=0)


def _cut(x: np.ndarray, sizes: list[int], dim: int) -> Values:
    return np.split(x, np.cumsum(sizes)[:-1], dim)


def _in_zeros(x: np.ndarray, rank: int, sizes: list[int], dim: int) -> np.ndarray:
    before, after = sum(sizes[:rank]), sum(sizes[rank + 1 :])
    return np.pad(x, [(before, after) if k == dim else (0, 0) for k in range(x.ndim)])


def _exchanged(xs: Values, sent: list[list[int]], split_dim: int, concat_dim: int) -> Values:
    chunks = [_cut(x, row, split_dim) for x, row in zip(xs, sent, strict=True)]
    return [np.concatenate([row[rank] for row in chunks], concat_dim) for rank in range(len(xs))]


def _moved(pairs: list[tuple[int, int]]) -> Callable[[Values], Values]:
    sources = {target: source for source, target in pairs}
    return lambda xs: [xs[sources[k]] if k in sources else 0 * xs[k] for k in range(len(xs))]


def _neighbour(rank: int, n: int, wrap: bool) -> int | None:
    return rank % n if wrap or 0 <= rank < n else None


def _with_borders(xs: Values, before: int, after: int, wrap: bool) -> Values:
    n, rows = len(xs), xs[0].shape[0]
    result = []
    for k, x in enumerate(xs):
        left, right = _neighbour(k - 1, n, wrap), _neighbour(k + 1, n, wrap)
        parts = [np.zeros((rows, before)) if left is None else xs[left][:, xs[left].shape[1] - before :], x]
        parts.append(np.zeros((rows, after)) if right is None else xs[right][:, :after])
        result.append(np.concatenate(parts, 1))
    return result


def _borders_added(ws: Values, before: int, after: int, wrap: bool) -> Values:
    n = len(ws)
    result = [w[:, before : w.shape[1] - after].copy() for w in ws]
    for k, w in enumerate(ws):
        left, right = _neighbour(k - 1, n, wrap), _neighbour(k + 1, n, wrap)
        if left is not None:
            result[left][:, result[left].shape[1] - before :] += w[:, :before]
        if right is not None:
            result[right][:, :after] += w[:, w.shape[1] - after :]
    return result
