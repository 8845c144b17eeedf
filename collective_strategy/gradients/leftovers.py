"""The blocking path for what the buckets could not take: late, sparse, newly trainable or user-made gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.inventory import Communicators, Inventory

Write = Callable[[int, Tensor], None]


def reduce_leftovers(inventory: Inventory, communicators: Communicators, write: Write) -> set[int]:
    """Reduces what lies in ``.grad`` now, whatever it is. Called by all ranks; what is reduced elsewhere was taken out.

    One small all-reduce per group says who has what, then one flat all-reduce per group, dtype and device, and one
    gather per sparse gradient.

    Args:
        inventory, communicators: The parameters and their ways.
        write: Takes the index and the reduced gradient of a parameter that some rank had a gradient of.

    Returns:
        The indices of sparse ones.
    """
    sparse_everywhere: set[int] = set()
    for axes, members in inventory.by_group.items():
        group = communicators.over(axes)
        gradients = [inventory.parameters[i].grad for i in members]
        present = [float(gradient is not None) for gradient in gradients]
        sparse = [float(gradient is not None and gradient.is_sparse) for gradient in gradients]
        flags = torch.tensor(present + sparse, dtype=torch.float32, device=group.device)
        group.all_reduce_(flags, "sum")
        counts = flags.tolist()
        chosen = [k for k in range(len(members)) if counts[k]]
        all_sparse = {k for k in chosen if counts[len(members) + k] == counts[k]}
        dense = [k for k in chosen if k not in all_sparse]
        routes = [inventory.routes[i] for i in members]
        scales = [route.scale if route is not None else 1.0 for route in routes]
        parameters = [inventory.parameters[i] for i in members]
        reduced = _reduce_dense(
            group, [parameters[k] for k in dense], [_dense(gradients[k]) for k in dense], [scales[k] for k in dense]
        )
        for k, gradient in zip(dense, reduced, strict=True):
            write(members[k], gradient)
        for k in sorted(all_sparse):
            write(members[k], _reduce_sparse(group, parameters[k], gradients[k], scales[k]))
        sparse_everywhere |= {members[k] for k in all_sparse}
    return sparse_everywhere


def _reduce_dense(
    group: Collective, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], scales: Sequence[float]
) -> list[Tensor]:
    results: list[Tensor] = [torch.empty(0)] * len(parameters)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, parameter in enumerate(parameters):
        kinds.setdefault((parameter.dtype, parameter.device), []).append(i)
    for (dtype, device), members in kinds.items():
        flat = torch.empty(sum(parameters[i].numel() for i in members), dtype=dtype, device=device)
        offset = 0
        for i in members:
            view = flat[offset : offset + parameters[i].numel()]
            offset += parameters[i].numel()
            gradient = gradients[i]
            if gradient is None:
                view.zero_()
            else:
                # scaled before the sum, as DistributedDataParallel does: large fp16 gradients do not overflow in it
                torch.mul(gradient.detach().reshape(-1), scales[i], out=view)
            results[i] = view.view(parameters[i].shape).detach()
        group.all_reduce_(flat, "sum")
    return results


def _reduce_sparse(group: Collective, parameter: nn.Parameter, gradient: Tensor | None, scale: float) -> Tensor:
    """The ranks touch different rows, so indices and values are gathered, not added in place."""
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.long, device=parameter.device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
            size=parameter.shape,
            check_invariants=False,
        )
    gradient = gradient.detach().coalesce()
    indices = group.all_gather(gradient.indices().t().contiguous(), dim=0, ragged=True)
    values = group.all_gather(gradient.values() * scale, dim=0, ragged=True)
    return torch.sparse_coo_tensor(indices.t(), values, size=parameter.shape, check_invariants=False).coalesce()


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
