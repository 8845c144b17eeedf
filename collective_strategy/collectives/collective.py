"""`Collective`: the public face, written once for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from collective_strategy.collectives import transport, uneven_shapes
from collective_strategy.collectives.arguments import (
    rank_argument,
    sizes_argument,
)
from collective_strategy.collectives.base import Plan
from collective_strategy.collectives.compiling import outside_graphs
from collective_strategy.collectives.data import DataOperations
from collective_strategy.collectives.errors import CollectiveStateError
from collective_strategy.collectives.in_place import InPlaceOperations
from collective_strategy.collectives.layout import Partition
from collective_strategy.collectives.objects import ObjectOperations
from collective_strategy.collectives.operations import ReduceOp


class Collective(DataOperations, InPlaceOperations, ObjectOperations):
    """A communicator over one ordered group of ranks.

    All members call the same operations in the same order. Rules of every operation here: ``x`` is a tensor, a Python
    number (int64, float64, bool), or a container of them, matched by key on all ranks; it is never changed, and the
    result shares no memory with it; the result has its dtype (but the mean of integers and bools is floating) and lies
    on its device; ranks (``src``, ``dst``) count within this collective; strides do not matter; with one rank the same
    rules hold. Wrong arguments raise TypeError or ValueError before anything is sent; see `errors` for the rest.

    One thread of a process uses a collective and its parts at a time: the ranks' threads could otherwise take turns in
    different orders, and in check mode they share one connection.

    Gradients flow through every operation with a pair in `OPERATIONS`; ``to`` chooses the pair where there are two.
    """

    # -- decisions -----------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Returns when all ranks have called it; ``name`` appears in time-out errors and must be equal on all ranks."""

        def plan() -> Plan:
            if name is not None and not isinstance(name, str):
                raise TypeError(f"barrier: name must be a string, got {name!r}.")
            return Plan(lambda: transport.barrier(self), f"barrier({name!r})" if name else "barrier()")

        self._run("barrier", plan)

    def all(self, flag: bool) -> bool:
        """True if ``flag`` is true on every rank. The same Python bool on all ranks."""
        return self._decide("all", flag, ReduceOp.ALL)

    def any(self, flag: bool) -> bool:
        """True if ``flag`` is true on some rank. The same Python bool on all ranks."""
        return self._decide("any", flag, ReduceOp.ANY)

    def exchange_sizes(self, sizes: int | Sequence[int]) -> list[int]:
        """Lengths that only their rank knows, as Python ints, for the ``sizes`` of a later call.

        Args:
            sizes: A length: the result lists every rank's. A list with one length per rank (what this rank will send to
                each): the result lists what each rank will send here.
        """

        def plan() -> Plan:
            many = not isinstance(sizes, int)
            if isinstance(sizes, int) and (isinstance(sizes, bool) or sizes < 0):
                raise ValueError(f"exchange_sizes: a length must be a whole number >= 0, got {sizes!r}.")
            own = torch.tensor(sizes_argument(self, sizes) if many else [sizes], dtype=torch.int64)
            ones = [1] * self.world_size

            def run() -> list[int]:
                received = transport.exchange(self, own, ones, ones) if many else transport.all_gather(self, own)
                return [int(size) for size in received.flatten().tolist()]

            return Plan(run, f"exchange_sizes({'list' if many else 'number'})", nbytes=8 * len(own))

        result: list[int] = self._run("exchange_sizes", plan)
        return result

    def _decide(self, name: str, flag: object, op: ReduceOp) -> bool:
        def plan() -> Plan:
            if isinstance(flag, Tensor) and flag.numel() != 1:
                raise TypeError(f"{name}: the flag must be one bool, got a tensor of shape {list(flag.shape)}.")
            own = torch.tensor(bool(flag))
            return Plan(lambda: bool(transport.all_reduce(self, own, op)), f"{name}()", nbytes=1)

        return bool(self._run(name, plan))

    # -- point to point ------------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        """Sends a tensor to rank ``dst``, which calls `recv`. Only where ``capabilities`` says so; not compared."""
        self._point_to_point("send", x, "dst", dst)

    def recv(self, like: Tensor, src: int) -> Tensor:
        """The tensor that rank ``src`` sends, of the shape and dtype of ``like``, whose values do not matter.

        Raises:
            CollectiveMismatchError: it sent another shape or dtype; the collective stays usable.
        """
        return self._point_to_point("recv", like, "src", src)

    @outside_graphs
    def _point_to_point(self, name: str, x: Tensor, argument: str, peer: int) -> Tensor:
        self._require_usable(name)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} takes one tensor, got {type(x).__name__}.")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} has no gradient; use shift() or permute(), or give x.detach().")
        other = rank_argument(self, argument, peer)
        if other == self.rank:
            raise ValueError(f"{name}: {argument}={peer} is this rank itself.")
        if name not in self.capabilities.primitives:
            raise NotImplementedError(f"the backend {self.backend_name!r} has no {name}; use shift() or permute().")
        with self._named(f"{name}({argument}={other})"):
            act = uneven_shapes.send if name == "send" else uneven_shapes.recv
            return act(self, x, other)

    # -- random numbers ------------------------------------------------------------------------------------------------

    def varying_rng(self) -> AbstractContextManager[None]:
        """Within it, torch's random numbers differ between the ranks of this collective: for dropout on, and start
        values of, pieces of a model. Nothing is sent.

        All ranks enter it at the same place. It seeds torch's generators (of the CPU and of the collective's device)
        from a number that it draws from the CPU's outer generator, and the rank, and puts them back at the end. So it
        goes on as before after a resume, and gives the same numbers in the recomputation of activation checkpointing,
        reentrant or not, wherever the outer generator does.

        Example:
            >>> with collective["model"].varying_rng():
            ...     hidden = dropout(own_features)
        """
        from collective_strategy.collectives.random_numbers import varying

        self._require_usable("varying_rng")
        return varying(self)

    def _own_program(self) -> AbstractContextManager[None]:
        """What is computed within, without communication, runs apart from the rest where a backend compiles programs.

        For computations that pick some of several tensors that look alike, which XLA's programs may confuse.
        """
        return nullcontext()

    def _generators(self) -> list[Any]:
        """What draws random numbers on this rank, each with draw(), seed(number), state() and restore(state)."""
        from collective_strategy.collectives.random_numbers import CPUGenerator, DeviceGenerator

        kind = self.device.type
        module = None if kind == "cpu" else getattr(torch, kind, None)
        has_own = hasattr(module, "get_rng_state") and hasattr(module, "manual_seed")
        return [CPUGenerator(), *([DeviceGenerator(module)] if has_own else [])]

    # -- groups --------------------------------------------------------------------------------------------------------

    def __getitem__(self, axes: str | tuple[str, ...]) -> Self:
        """The sub-collective of a mesh axis, a declared union, or axes joined by a declared union.

        Raises:
            KeyError: unknown; the message lists what there is. Groups are not made here, because making one is itself
                an act of all ranks.
        """
        if not self.is_set_up:
            raise CollectiveStateError(
                f"collective[{axes!r}] is available after setup(); under a Trainer from setup() on."
            )
        if self._root is not self:
            raise KeyError(f"{axes!r}: {self.name!r} is a part of a collective and has no axes; index the whole one.")
        if self.mesh is None:
            raise KeyError(f"{axes!r}: this collective has no mesh. Give one: mesh={{'data': -1, {axes!r}: 2}}.")
        order = list(self.mesh.axes)
        key = (
            tuple(sorted(axes, key=lambda axis: order.index(axis) if axis in order else -1))
            if isinstance(axes, tuple)
            else axes
        )
        if isinstance(key, tuple) and len(key) == 1:
            key = key[0]
        for known, sub in self._subgroups.items():
            if known == key or (isinstance(known, tuple) and isinstance(key, tuple) and set(known) == set(key)):
                return sub
        unions = {name: tuple(joined) for name, joined in self.mesh.unions.items()}
        raise KeyError(
            f"{axes!r} is not in the mesh. Its axes are {dict(self.mesh.axes)}, its unions {unions or 'none'}; "
            "unions are declared at construction: unions={'name': ('axis', 'axis')}."
        )

    @property
    def data(self) -> Self:
        """The sub-collective that splits the batch: this one without a mesh, one rank with ``data_axis=None``."""
        if self._root is not self or self.mesh is None or not self.is_set_up:
            return self
        if self.data_axis is not None:
            return self[self.data_axis]
        if "data" not in self._subgroups:
            alone = self._subgroup("data (none)", None, Partition((self.rank,)), "replicate")
            self._subgroups["data"] = alone
        return self._subgroups["data"]

    def duplicate(self, axes: str | Sequence[str] | None = None) -> Self:
        """A collective whose operations never meet those of this one. All ranks call it.

        For library code that communicates while the user may, such as during a backward pass.

        Args:
            axes: Axes of the mesh to join; all ranks of this collective if not given.

        Raises:
            ValueError: an axis is not in the mesh.
        """

        def plan() -> Plan:
            names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
            axes_here = list(self.mesh.axes) if self.mesh is not None else []
            unknown = [name for name in names if name not in axes_here]
            if unknown:
                raise ValueError(f"duplicate: {unknown[0]!r} is not an axis of the mesh, which has {axes_here}.")
            if self.mesh is None or axes is None:
                everybody = tuple(range(self.world_size))
                partition, name = Partition(everybody, explicit=(everybody,)), self.name
            else:
                partition, name = self.mesh.partition(names, self.rank), "+".join(names)
            return Plan(
                lambda: self._subgroup(f"{name} (duplicate)", names or None, partition), f"duplicate({list(names)})"
            )

        result: Self = self._run("duplicate", plan)
        return result

    @outside_graphs
    def split(self, color: Any) -> Self:
        """The sub-collective of all ranks that gave the same ``color``, in rank order. All ranks call it.

        Args:
            color: Any hashable, picklable value; None puts the rank in no group (its operations then raise).
        """

        def plan() -> Plan:
            try:
                hash(color)
            except TypeError as error:
                raise TypeError(f"split: a color must be hashable, got {color!r} ({error}).") from None
            return self._plan_all_gather_object("split", color)

        colors = self._run("split", plan)
        groups: dict[Any, list[int]] = {}
        for rank, other in enumerate(colors):
            if other is not None:
                groups.setdefault(other, []).append(rank)
        explicit = tuple(tuple(ranks) for ranks in groups.values())
        if color is None:
            self._no_group(Partition((), explicit=explicit))
            return self._outsider(
                f"rank {self.rank} gave color None to split() and is in no group; it is not a member of "
                f"{list(explicit)}."
            )
        members = next(group for group in explicit if self.rank in group)
        return self._guarded(lambda: self._subgroup(f"split({color!r})", None, Partition(members, explicit=explicit)))
