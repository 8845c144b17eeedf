"""The table that `explain` makes: its rows as data, plain text, and `rich`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collective_strategy.inspection.text_table import aligned

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
            f"{nbytes} bytes together; flags that say who used which weight travel along."
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


def _between(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
