"""`explain`: a table of every weight, what it is on each axis, and how its gradient travels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators, Inventory, Route
from collective_strategy.gradients.plan import BucketSizes, cut_into_buckets
from collective_strategy.inspection.explanation import EVERYWHERE, ExplainedTensor, Explanation
from collective_strategy.sharing.marks import Mark
from collective_strategy.sharing.roles import Role, UnmarkedPolicy


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
    sizes = BucketSizes.suited_to(collective.capabilities, sizes)
    cut = cut_into_buckets(inventory, trainable, sizes, reduce_dtype, compression, interleaved=True)
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


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
