"""Operations on tensors and containers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives import autograd, transport, uneven_shapes
from collective_strategy.collectives.arguments import (
    chunk_sizes,
    destination,
    dim_argument,
    needs_grad,
    pairs_argument,
    rank_argument,
    refuse_grad,
    refuse_op_without_gradient,
    sizes_argument,
    width_argument,
)
from collective_strategy.collectives.base import CollectiveBase, Plan
from collective_strategy.collectives.operations import ReduceOp
from collective_strategy.collectives.reductions import refuse_reduction
from collective_strategy.collectives.trees import Tree


class DataOperations(CollectiveBase):
    """The methods that communicate tensors; their common rules stand at `Collective`."""

    def all_gather(
        self, x: Any, dim: int | None = None, *, ragged: bool = False, sizes: Sequence[int] | None = None,
        to: str | None = None,
    ) -> Any:  # fmt: skip
        """Every rank's tensor, on every rank, in rank order.

        Args:
            x: Of one shape and dtype on all ranks, unless ``ragged`` or ``sizes``.
            dim: None stacks: ``(world_size, *x.shape)``. A number concatenates along this dim.
            ragged: Shapes may differ and are exchanged first: the list of exact pieces (``dim=None``), or their
                concatenation along ``dim``, the only dim that may differ.
            sizes: The lengths along ``dim`` (along the first dim with ``dim=None``), one per rank, equal on all ranks;
                saves the exchange.
            to: ``"replicate"``: backward sums the copies' gradients and gives each rank its slice (reduce_scatter);
                ``"invariant"``: backward takes the own slice. Default on the data axis: replicate.

        Example:
            >>> z = collective.all_gather(torch.ones(3))   # (world_size, 3)
        """

        def plan() -> Plan:
            tree = Tree.of(x, "all_gather")
            mode = destination(self, to, tree, "all_gather")
            pair = autograd.all_gather_replicate if mode == "replicate" else autograd.all_gather_invariant
            dims = _dims(tree, dim)
            given = None if sizes is None else sizes_argument(self, sizes)
            if given is not None:
                uneven_shapes.check_own_sizes(self, tree, dims, given)
            uneven = ragged or given is not None
            call = f"all_gather(dim={dim}, ragged={ragged}, sizes={given}, to={mode}) of "
            call += self._describe(tree, not uneven)

            def one(leaf: Tensor, at: int | None) -> Any:
                if uneven:
                    return uneven_shapes.all_gather(self, leaf, at, given, pair)
                lengths = (1 if at is None else leaf.shape[at],) * self.world_size
                return pair(self, leaf.unsqueeze(0), 0, lengths) if at is None else pair(self, leaf, at, lengths)

            return Plan(lambda: tree.map(one, dims), call, nbytes=_nbytes(tree))

        return self._run("all_gather", plan)

    def broadcast(self, x: Any, src: int = 0, *, to: str | None = None) -> Any:
        """The value of rank ``src``, on every rank.

        Args:
            x: Structure, shape and dtype are equal on all ranks; only src's values matter. Objects of unknown size
                have `broadcast_object`.
            src: The rank whose value is sent.
            to: ``"replicate"``: the gradients' sum arrives at src; ``"invariant"``: src keeps its own. Zeros elsewhere.
        """

        def plan() -> Plan:
            root = rank_argument(self, "src", src)
            tree = Tree.of(x, "broadcast")
            mode = destination(self, to, tree, "broadcast")
            pair = autograd.broadcast_replicate if mode == "replicate" else autograd.broadcast_invariant
            call = f"broadcast(src={root}, to={mode}) of {self._describe(tree)}"
            return Plan(lambda: tree.map(lambda leaf: pair(self, leaf, root)), call, nbytes=_nbytes(tree))

        return self._run("broadcast", plan)

    def all_reduce(self, x: Any, op: str = "sum", *, to: str | None = None) -> Any:
        """The reduction over all ranks, element by element, on every rank.

        Args:
            x: Structure, shape and dtype are equal on all ranks.
            op: sum, mean (avg), max, min, prod; band, bor, bxor on integers; all, any on bools. float16 and bfloat16
                are reduced in float32; max and min propagate NaN; the mean of integers and bools is floating.
            to: ``"replicate"``: backward is the same reduction of the gradients; ``"invariant"``: backward hands the
                gradient on as it is (divided by the number of ranks for mean). Only sum and mean have a gradient.
        """
        return self._run("all_reduce", lambda: self._plan_reduction("all_reduce", x, op, to))

    def reduce(self, x: Any, op: str = "mean", dst: int | None = None, *, to: str | None = None) -> Any:
        """As `all_reduce` with another default; with ``dst``, the result on that rank only and None elsewhere.

        With ``dst`` a tensor that requires grad is refused.
        """

        def plan() -> Plan:
            if dst is None:
                return self._plan_reduction("reduce", x, op, to)
            root = rank_argument(self, "dst", dst)
            planned = self._plan_reduction("reduce", x, op, to, rooted=True)
            planned.call += f" to rank {root}"

            def run() -> Any:
                result = planned_run()
                return result if self.rank == root else None

            planned_run, planned.run = planned.run, run
            return planned

        return self._run("reduce", plan)

    def _plan_reduction(self, name: str, x: Any, op: str, to: str | None, rooted: bool = False) -> Plan:
        reduce_op = ReduceOp.parse(op)
        tree = Tree.of(x, name)
        for index, (leaf, path) in enumerate(tree.named()):
            if tree.python_numbers[index] and reduce_op is ReduceOp.MEAN and not leaf.is_complex():
                tree.leaves[index] = leaf.to(torch.float64)  # the mean of Python ints is a Python float's dtype
            refuse_reduction(reduce_op, tree.leaves[index].dtype, path, name)
        refuse_op_without_gradient(tree, reduce_op, name)
        if rooted:
            refuse_grad(tree, f"{name}(dst=...)", "Use all_reduce")
        mode = destination(self, to, tree, name)
        pair = autograd.all_reduce_replicate if mode == "replicate" else autograd.all_reduce_invariant
        call = f"{name}(op={reduce_op.value}, to={mode}) of {self._describe(tree)}"
        return Plan(lambda: tree.map(lambda leaf: pair(self, leaf, reduce_op)), call, nbytes=_nbytes(tree))

    def gather(self, x: Any, dst: int = 0, dim: int | None = None, *, ragged: bool = False) -> Any:
        """As `all_gather` on rank ``dst``, None elsewhere. A tensor that requires grad is refused."""

        def plan() -> Plan:
            root = rank_argument(self, "dst", dst)
            tree = Tree.of(x, "gather")
            refuse_grad(tree, "gather", "Use all_gather")
            dims = _dims(tree, dim)
            call = f"gather(dst={root}, dim={dim}, ragged={ragged}) of {self._describe(tree, not ragged)}"

            def one(leaf: Tensor, at: int | None) -> Any:
                if ragged:
                    return uneven_shapes.gather(self, leaf, root, at)
                stacked = transport.gather_to(self, leaf, root)
                if stacked is None or at is None:
                    return stacked
                return torch.cat(list(stacked.unbind(0)), at)

            def run() -> Any:
                result = tree.map(one, dims)
                return result if self.rank == root else None

            return Plan(run, call, nbytes=_nbytes(tree))

        return self._run("gather", plan)

    def reduce_scatter(self, x: Any, op: str = "sum", dim: int = 0, *, sizes: Sequence[int] | None = None) -> Any:
        """Own chunk of the reduction.

        Args:
            x: Structure, shape and dtype are equal on all ranks; cut along ``dim`` into one chunk per rank.
            op: As in `all_reduce`.
            dim: Where to cut.
            sizes: Chunk lengths, one per rank, equal on all ranks; equal chunks if not given.

        Backward: the chunks' gradients gathered (all_gather), for sum and mean.
        """

        def plan() -> Plan:
            reduce_op = ReduceOp.parse(op)
            tree = Tree.of(x, "reduce_scatter")
            refuse_op_without_gradient(tree, reduce_op, "reduce_scatter")
            for leaf, path in tree.named():
                refuse_reduction(reduce_op, leaf.dtype, path, "reduce_scatter")
            cuts = self._cuts(tree, dim, sizes)
            call = f"reduce_scatter(op={reduce_op.value}, dim={dim}, sizes={_listed(sizes)}) of {self._describe(tree)}"
            return Plan(
                lambda: tree.map(lambda leaf, at, cut: autograd.reduce_scatter(self, leaf, reduce_op, at, cut), cuts),
                call,
                nbytes=_nbytes(tree),
            )

        return self._run("reduce_scatter", plan)

    def scatter(self, x: Any, src: int = 0, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Any:
        """Own chunk of the tensor of rank ``src``.

        Args:
            x: Structure, shape and dtype are equal on all ranks; only src's values matter.
            src, dim, sizes: Whose tensor is cut, where, and into which lengths (equal on all ranks).

        Backward: the chunks' gradients gathered at src, zeros elsewhere.
        """

        def plan() -> Plan:
            root = rank_argument(self, "src", src)
            tree = Tree.of(x, "scatter")
            cuts = self._cuts(tree, dim, sizes)
            call = f"scatter(src={root}, dim={dim}, sizes={_listed(sizes)}) of {self._describe(tree)}"
            return Plan(
                lambda: tree.map(lambda leaf, at, cut: autograd.scatter(self, leaf, root, at, cut), cuts),
                call,
                nbytes=_nbytes(tree),
            )

        return self._run("scatter", plan)

    def all_to_all(
        self, x: Any, split_dim: int = 0, concat_dim: int = 0, *,
        sizes: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Any:  # fmt: skip
        """Chunk k goes to rank k; what arrives is concatenated in rank order.

        Args:
            x: Cut along ``split_dim``.
            split_dim, concat_dim: Where to cut, and along which dim to join.
            sizes: ``(sent, received)``: lengths along ``split_dim`` of the chunks for each rank, and along
                ``concat_dim`` of the chunks from each rank. Equal chunks if not given. With different dims, all ranks
                give the same ``sent``; with one dim, ``sent[k]`` here must be ``received[rank]`` on rank k.

        Backward: the inverse exchange.
        """

        def plan() -> Plan:
            tree = Tree.of(x, "all_to_all")
            cuts = []
            for leaf, path in tree.named():
                at, onto = (
                    dim_argument("split_dim", split_dim, leaf, path),
                    dim_argument("concat_dim", concat_dim, leaf, path),
                )
                out = chunk_sizes(self, None if sizes is None else sizes[0], leaf, at, path)
                into = out if at == onto else (leaf.shape[onto],) * self.world_size
                if sizes is not None:
                    into = sizes_argument(self, sizes[1], "received sizes")
                    if at != onto and into[self.rank] != leaf.shape[onto]:
                        raise ValueError(
                            f"all_to_all: received sizes {list(into)} say that this rank (rank {self.rank}) holds "
                            f"{into[self.rank]} entries along concat_dim {onto}, but {path} has {leaf.shape[onto]}."
                        )
                cuts.append((at, onto, out, into))
            call = f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim}, sizes={'given' if sizes else None}) of "
            call += self._describe(tree, shapes=sizes is None)
            return Plan(
                lambda: tree.map(lambda leaf, *cut: autograd.all_to_all(self, leaf, *cut), cuts),
                call,
                uneven_shapes.exchange_details(cuts),
                uneven_shapes.verify_exchange,
                nbytes=_nbytes(tree),
            )

        return self._run("all_to_all", plan)

    def replicate(self, x: Any) -> Any:
        """x as it is; backward sums the ranks' gradients. Enters a region where each rank does something of its own.

        Nothing is sent in forward. Also known as Megatron's f.
        """

        def plan() -> Plan:
            tree = Tree.of(x, "replicate")
            return Plan(
                lambda: tree.map(lambda leaf: autograd.replicate(self, leaf)), f"replicate() of {self._describe(tree)}"
            )

        return self._run("replicate", plan)

    def shard(self, x: Any, dim: int = 0, *, sizes: Sequence[int] | None = None, of: str = "invariant") -> Any:
        """Own chunk of a tensor that is equal on all ranks. Nothing is sent in forward.

        Args:
            x: Equal on all ranks.
            dim, sizes: Where to cut, and the lengths, one per rank, equal on all ranks.
            of: ``"invariant"``: backward gathers the chunks' gradients; ``"replicate"``: backward puts the own gradient
                between zeros (a contribution to be summed).
        """

        def plan() -> Plan:
            if of not in ("invariant", "replicate"):
                raise ValueError(f"shard: of={of!r} is not one of 'invariant', 'replicate'.")
            pair = autograd.shard_invariant if of == "invariant" else autograd.shard_replicate
            tree = Tree.of(x, "shard")
            cuts = self._cuts(tree, dim, sizes)
            call = f"shard(dim={dim}, sizes={_listed(sizes)}, of={of}) of {self._describe(tree)}"
            return Plan(lambda: tree.map(lambda leaf, *cut: pair(self, leaf, *cut), cuts), call)

        return self._run("shard", plan)

    def shift(self, x: Any, offset: int = 1, wrap: bool = True) -> Any:
        """The tensor of rank ``rank - offset``, zeros where there is none (``wrap=False``). Backward: the inverse."""

        def plan() -> Plan:
            if isinstance(offset, bool) or not isinstance(offset, int):
                raise TypeError(f"shift: offset must be a whole number, got {offset!r}.")
            return self._plan_permute("shift", f"offset={offset}, wrap={wrap}", x, self._shift_pairs(offset, wrap))

        return self._run("shift", plan)

    def halo_exchange(self, x: Any, dim: int, width: int | tuple[int, int], *, wrap: bool = False) -> Any:
        """x with its neighbours' borders on both sides: what a convolution over a domain split along ``dim`` needs.

        Args:
            x: Rank k holds the k-th piece of the domain. Lengths along ``dim`` may differ, other dims may not.
            dim: The dim that is split.
            width: Entries from each side, or (from the rank before, from the rank after); no piece may be shorter.
            wrap: Whether the domain is periodic. Otherwise the outer borders are zeros, as zero padding gives them.

        Backward: the borders' gradients are added to the neighbours'.
        """

        def plan() -> Plan:
            before, after = width_argument(width)
            tree = Tree.of(x, "halo_exchange")
            dims = [(dim_argument("dim", dim, leaf, path),) for leaf, path in tree.named()]
            others = []
            for (leaf, path), (at,) in zip(tree.named(), dims, strict=True):
                length = leaf.shape[at]
                if length < max(before, after):
                    raise ValueError(
                        f"halo_exchange: rank {self.rank} holds {length} entries of {path} along dim {dim}, which "
                        f"cannot give borders of widths {before} and {after}. Split the domain over fewer ranks."
                    )
                others.append([size for other, size in enumerate(leaf.shape) if other != at])

            def one(leaf: Tensor, at: int) -> Tensor:
                return autograd.halo_exchange(self, leaf, at, before, after, wrap)

            call = f"halo_exchange(dim={dim}, width={(before, after)}, wrap={wrap}) of "
            call += f"{self._describe(tree, shapes=False)}, lengths of the other dims {others}"
            return Plan(lambda: tree.map(one, dims), call, nbytes=_nbytes(tree))

        return self._run("halo_exchange", plan)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """The tensor of the rank that sends to this one, zeros if none does.

        Args:
            x: Of one shape and dtype on all ranks.
            pairs: (source, target) ranks, equal on all ranks, no rank twice on a side.

        Backward: the inverse pairs.
        """

        def plan() -> Plan:
            checked = pairs_argument(self, pairs)
            return self._plan_permute("permute", f"pairs={list(checked)}", x, checked)

        return self._run("permute", plan)

    def _shift_pairs(self, offset: int, wrap: bool) -> tuple[tuple[int, int], ...]:
        n = self.world_size
        return tuple((k, (k + offset) % n) for k in range(n) if wrap or 0 <= k + offset < n)

    def _plan_permute(self, name: str, settings: str, x: Any, pairs: tuple[tuple[int, int], ...]) -> Plan:
        tree = Tree.of(x, name)
        call = f"{name}({settings}) of {self._describe(tree)}"
        return Plan(lambda: tree.map(lambda leaf: autograd.permute(self, leaf, pairs)), call, nbytes=_nbytes(tree))

    def _cuts(self, tree: Tree, dim: int, sizes: Sequence[int] | None) -> list[tuple[int, tuple[int, ...]]]:
        result = []
        for leaf, path in tree.named():
            at = dim_argument("dim", dim, leaf, path)
            result.append((at, chunk_sizes(self, sizes, leaf, at, path)))
        return result

    def _describe(self, tree: Tree, shapes: bool = True) -> str:
        return tree.describe(shapes) + (", requires grad" if needs_grad(tree) else "")


def _dims(tree: Tree, dim: int | None) -> list[tuple[int | None]]:
    return [(None if dim is None else dim_argument("dim", dim, leaf, path),) for leaf, path in tree.named()]


def _nbytes(tree: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves)


def _listed(sizes: Sequence[int] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)
