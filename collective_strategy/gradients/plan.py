"""The agreed list of parameters, and the one flat reduction per dtype that serves them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from collective_strategy.collectives.collective import Collective


@dataclass
class ReductionPlan:
    """Names and parameters in the order that all ranks agreed on; shared parameters appear once."""

    names: list[str]
    parameters: list[nn.Parameter]
    index: dict[int, int] = field(default_factory=dict)
    signature: list[tuple[int, torch.Size, torch.dtype]] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> "ReductionPlan":
        named = list(module.named_parameters())
        parameters = [parameter for _, parameter in named]
        return cls(
            names=[name for name, _ in named],
            parameters=parameters,
            index={id(parameter): i for i, parameter in enumerate(parameters)},
            signature=_signature(parameters),
        )

    def is_stale(self, module: nn.Module) -> bool:
        """Whether a parameter was added, removed, replaced or changed its dtype since the plan was made."""
        return _signature(module.parameters()) != self.signature


def _signature(
    parameters: Sequence[nn.Parameter] | Iterator[nn.Parameter],
) -> list[tuple[int, torch.Size, torch.dtype]]:
    return [(id(parameter), parameter.shape, parameter.dtype) for parameter in parameters]


def reduce_dense(
    collective: Collective, parameters: Sequence[nn.Parameter], fresh: Sequence[Tensor | None]
) -> list[Tensor]:
    """The mean over the ranks of each gradient, with zeros where a rank has none.

    Called by every rank with the same parameters in the same order. One all-reduce per dtype and device.
    Each gradient is scaled by 1/n *before* the sum, as DistributedDataParallel does, so that the results are
    bit-equal to it at two ranks and large fp16 gradients do not overflow in the sum.

    Returns:
        One tensor of the parameter's shape each, views of the flat buffers.
    """
    scale = 1.0 / collective.world_size
    results: list[Tensor] = [torch.empty(0)] * len(parameters)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, parameter in enumerate(parameters):
        groups.setdefault((parameter.dtype, parameter.device), []).append(i)
    for (dtype, device), members in groups.items():
        flat = torch.empty(sum(parameters[i].numel() for i in members), dtype=dtype, device=device)
        offset = 0
        for i in members:
            view = flat[offset : offset + parameters[i].numel()]
            gradient = fresh[i]
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient.reshape(-1), scale, out=view)
            results[i] = view.view(parameters[i].shape)
            offset += parameters[i].numel()
        collective.all_reduce_(torch.view_as_real(flat) if flat.is_complex() else flat, "sum")
    return results


def reduce_sparse(collective: Collective, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    """The mean over the ranks of one sparse (COO) gradient, coalesced.

    The ranks touch different rows, so indices and values are gathered, not added in place.
    """
    if gradient is None:
        # an empty gradient has as many index rows as the others': whole rows of the first dimension
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.long, device=parameter.device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
            size=parameter.shape,
        )
    gradient = gradient.coalesce()
    # (nnz, sparse_dim): the number of entries is the ragged first dimension
    indices = collective.all_gather(gradient.indices().t().contiguous(), dim=0, ragged=True)
    values = collective.all_gather(gradient.values().detach() / collective.world_size, dim=0, ragged=True)
    return torch.sparse_coo_tensor(indices.t(), values, size=parameter.shape).coalesce()
