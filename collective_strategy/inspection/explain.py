"""`explain`: a table of every weight, what it is on each axis, and how its gradient travels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators, Inventory, Route
from collective_strategy.gradients.plan import BucketSizes, cut_into_buckets
from collective_strategy.inspection.text_table import aligned
from collective_strategy.sharing.marks import Mark
from collective_strategy.sharing.roles import Role, UnmarkedPolicy

if TYPE_CHECKING:
    from rich.table import Table

EVERYWHERE: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExplainedTensor:
    """One row: a parameter or a buffer.

    Attributes:
        name: Qualified name; further names of a tied weight in ``aliases``.
        kind: ``"parameter"`` or ``"buffer"``.
        shape, dtype: Of this rank's tensor.
        trainable: Whether it has a gradient.
        roles: What it is on each model axis, such as ``("model", "shared, sum")``.
        collective: ``"all_reduce"`` (gradient), ``"broadcast"`` (buffer), or ``""`` where nothing is sent.
        over: The axes of its group, in mesh order.
        operation: What is done, such as ``"sum over model, mean over data"``.
        bucket: Number of the bucket among those over the same axes, in the order in which they are sent; None where
            nothing is.
        nbytes: Bytes on the way per backward; of a buffer its size.
        ranks: The ranks that have it; empty if all have, or if the others were not asked.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    roles: tuple[tuple[str, str], ...]
    collective: str
    over: tuple[str, ...]
    operation: str
    bucket: int | None
    nbytes: int
    aliases: tuple[str, ...] = ()
    ranks: tuple[int, ...] = EVERYWHERE

    @property
    def elements(self) -> int:
        """Of this rank's tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Explanation:
    """The table: ``str()`` is plain text, ``rich.print`` shows it in colour, the attributes are its data.

    Attributes:
        rows: Parameters in registration order, then buffers.
        axes: Sizes of the mesh's axes.
        data_axes: Those over which gradients are averaged.
        rank: Whose tensors these are; None if all ranks' are.
    """

    rows: tuple[ExplainedTensor, ...]
    axes: dict[str, int]
    data_axes: tuple[str, ...]
    rank: int | None

    def __str__(self) -> str:
        parts = [self.title]
        for kind in ("parameter", "buffer"):
            head, body = self._cells(kind)
            if body:
                parts.append(aligned(head, body, right=("bucket", "bytes")))
        head, body = self._totals()
        if body:
            parts.append(aligned(head, body, right=head[1:]))
        return "\n\n".join([*parts, self.summary])

    def __rich__(self) -> Table:
        from rich.table import Table

        head, body = self._cells("parameter")
        table = Table(title=self.title, caption=self.summary)
        for name in head:
            table.add_column(name, justify="right" if name in ("bucket", "bytes") else "left", overflow="fold")
        for row in body:
            table.add_row(*row)
        buffer_head, buffers = self._cells("buffer")
        table.add_section()
        for row in buffers:
            cells = dict(zip(buffer_head, row, strict=True))
            cells |= {"parameter": cells["buffer"], "gradient": f"kept equal {cells['kept equal']}", "bucket": "-"}
            table.add_row(*(cells.get(name, "all") for name in head))
        return table

    @property
    def title(self) -> str:
        """The mesh in one line."""
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        whose = "all ranks" if self.rank is None else f"rank {self.rank}"
        averaged = f"gradients are averaged over {', '.join(self.data_axes)}" if self.data_axes else "no data axis"
        return f"Weights of {whose} on the mesh {axes}; {averaged}."

    @property
    def summary(self) -> str:
        """What one backward sends."""
        divided = any(row.ranks for row in self.rows)
        ranks = range(math.prod(self.axes.values()) if divided else 1)
        sent = [[r for r in self.rows if r.bucket is not None and (not r.ranks or rank in r.ranks)] for rank in ranks]
        nbytes = _between({sum(row.nbytes for row in rows) for rows in sent})
        buckets = _between({len({(row.over, row.bucket) for row in rows}) for rows in sent})
        if not any(sent):
            return "No gradient is sent."
        return (
            f"Per backward each rank takes part in {buckets} all-reduce{'' if buckets == '1' else 's'} of gradients, "
            f"{nbytes} bytes together, and in a small one of flags per group."
        )

    def row(self, name: str) -> ExplainedTensor:
        """The row of a parameter or buffer by (one of) its names.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if name == row.name or name in row.aliases:
                return row
        raise KeyError(f"{name!r} is none of {[row.name for row in self.rows]}.")

    def _cells(self, kind: str) -> tuple[list[str], list[list[str]]]:
        rows = [row for row in self.rows if row.kind == kind]
        model_axes = [axis for axis in self.axes if axis not in self.data_axes]
        divided = any(row.ranks for row in rows)
        head = [kind, *(["ranks"] if divided else []), "shape", "dtype", *model_axes]
        head += ["gradient", "bucket", "bytes"] if kind == "parameter" else ["kept equal", "bytes"]
        body = []
        for row in rows:
            name = " = ".join([row.name, *row.aliases])
            ranks = [", ".join(map(str, row.ranks)) if row.ranks else "all"] if divided else []
            roles = dict(row.roles)
            shape = " x ".join(map(str, row.shape)) or "scalar"
            cells = [name, *ranks, shape, row.dtype, *(roles.get(axis, "") for axis in model_axes), row.operation]
            if kind == "parameter":
                cells.append("-" if row.bucket is None else str(row.bucket))
            body.append([*cells, f"{row.nbytes:,}"])
        return head, body

    def _totals(self) -> tuple[list[str], list[list[str]]]:
        head = ["gradients over", "ranks", "weights", "elements", "all-reduces", "bytes"]
        groups: dict[tuple[str, ...], list[ExplainedTensor]] = {}
        for row in self.rows:
            if row.kind == "parameter":
                groups.setdefault(row.over if row.bucket is not None else (), []).append(row)
        body = []
        for over, rows in sorted(groups.items(), key=lambda item: -len(item[0])):
            size = math.prod(self.axes[axis] for axis in over)
            elements = sum(row.elements for row in rows)
            buckets = len({(row.ranks, row.bucket) for row in rows if row.bucket is not None})
            nbytes = sum(row.nbytes for row in rows if row.bucket is not None)
            name = ", ".join(over) or "not sent"
            cells = [size if over else "", len(rows), f"{elements:,}", buckets or "", f"{nbytes:,}" if over else ""]
            body.append([name, *map(str, cells)])
        return head, body


def explain(
    module: nn.Module,
    collective: Collective,
    *,
    unmarked: UnmarkedPolicy = "private",
    sizes: BucketSizes | None = None,
    reduce_dtype: torch.dtype | None = None,
    compression: torch.dtype | None = None,
    buffers: str = "",
    all_ranks: bool = False,
) -> Explanation:
    """A table of the module's weights: shape, role on each axis, how the gradient is reduced, bucket, bytes.

    Local, so one rank may call it alone; unless ``all_ranks``, when all ranks must.

    Args:
        module: The module.
        collective: All ranks, with their mesh, set up.
        unmarked, sizes, reduce_dtype, compression: As given to `GradientReducer`, so that buckets are the same.
        buffers: When and how buffers are made equal, to be shown.
        all_ranks: Ask the other ranks, and say which weights only some of them have. They may differ between model
            ranks, for instance in private layers.

    Raises:
        ValueError: a mark is wrong, see `resolve_roles`, or a parameter has no shape yet.

    Example:
        >>> print(explain(model, collective))
    """
    collective._require_usable("explain")
    communicators = Communicators(collective)
    inventory = Inventory(module, communicators, unmarked)
    trainable = [i for i in inventory.routed if inventory.parameters[i].requires_grad]
    cut = cut_into_buckets(inventory, trainable, sizes or BucketSizes(), reduce_dtype, compression, interleaved=True)
    before: dict[tuple[str, ...], int] = {}
    place: dict[int, tuple[int, torch.dtype]] = {}
    for members, bucket_route, wire in cut:
        number = before.get(bucket_route.axes, 0)
        before[bucket_route.axes] = number + 1
        place.update(dict.fromkeys(members, (number, wire)))
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    rows = []
    for i, parameter in enumerate(inventory.parameters):
        route, role = inventory.routes[i], inventory.roles[i]
        sent = place.get(i)
        rows.append(
            ExplainedTensor(
                inventory.names[i],
                "parameter",
                tuple(parameter.shape),
                _name(parameter),
                parameter.requires_grad,
                _roles(communicators, role),
                "all_reduce" if sent else "",
                route.axes if sent and route else (),
                _operation(communicators, role, route) if parameter.requires_grad else "frozen",
                sent[0] if sent else None,
                parameter.numel() * sent[1].itemsize if sent else 0,
                tuple(names[id(parameter)][1:]),
            )
        )
    rows += _buffer_rows(module, communicators, unmarked, buffers)
    axes = dict(communicators.sizes)
    explanation = Explanation(tuple(rows), axes, communicators.data_axes, collective.rank)
    if not all_ranks:
        return explanation
    return replace(explanation, rows=_merged(collective.all_gather_object(explanation.rows)), rank=None)


def _buffer_rows(
    module: nn.Module, communicators: Communicators, unmarked: UnmarkedPolicy, policy: str
) -> list[ExplainedTensor]:
    rows = []
    roles = communicators.roles(module, unmarked, buffers=True)
    for name, buffer in module.named_buffers():
        over = communicators.replicated(roles[name])
        text = f"over {', '.join(over)}{' ' + policy if policy else ''}" if over else "-"
        rows.append(
            ExplainedTensor(
                name,
                "buffer",
                tuple(buffer.shape),
                _name(buffer),
                False,
                _roles(communicators, roles[name], gradient=False),
                "broadcast" if over else "",
                over,
                text,
                None,
                buffer.numel() * buffer.element_size(),
            )
        )
    return rows


def _merged(per_rank: list[tuple[ExplainedTensor, ...]]) -> tuple[ExplainedTensor, ...]:
    """Rows of all ranks: equal ones once, beside those of the same name that look different on other ranks."""
    holders: dict[ExplainedTensor, list[int]] = {}
    for rank, rows in enumerate(per_rank):
        for row in rows:
            holders.setdefault(row, []).append(rank)
    names: dict[tuple[str, str], int] = {}
    for row in holders:
        names.setdefault((row.kind, row.name), len(names))
    ordered = sorted(holders, key=lambda row: (row.kind != "parameter", names[row.kind, row.name], holders[row][0]))
    everybody = list(range(len(per_rank)))
    return tuple(replace(r, ranks=EVERYWHERE if holders[r] == everybody else tuple(holders[r])) for r in ordered)


def _roles(communicators: Communicators, role: Role, gradient: bool = True) -> tuple[tuple[str, str], ...]:
    return tuple((axis, _role(role.mark(axis), gradient)) for axis in communicators.model_axes)


def _role(mark: Mark | None, gradient: bool) -> str:
    if mark is None:
        return "unmarked"
    if mark.kind == "shared":
        return f"shared, {mark.grad}" if gradient else "shared"
    if mark.kind == "sharded":
        parts = f", parts {', '.join(map(str, mark.parts))}" if mark.parts else ""
        return f"sharded, dim {mark.dim}{parts}"
    return "private"


def _operation(communicators: Communicators, role: Role, route: Route | None) -> str:
    if route is None:
        return "stays"
    averaged = {*communicators.data_axes, *role.averaged_over}
    summed = [axis for axis in route.axes if axis not in averaged]
    meant = [axis for axis in route.axes if axis in averaged]
    parts = [f"{word} over {', '.join(axes)}" for word, axes in (("sum", summed), ("mean", meant)) if axes]
    return ", ".join(parts)


def _between(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
