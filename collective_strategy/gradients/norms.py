"""Gradient norms, clipping and loss scaling over the mesh: every weight counted once, one value on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collective_strategy.collectives.collective import Collective
from collective_strategy.gradients.guard import StepGuard
from collective_strategy.gradients.inventory import Communicators, Inventory


class NormOperations:
    """The part of `GradientReducer` that works on reduced gradients.

    A weight that is replicated over an axis enters a norm once; pieces (sharded and private weights) are summed over
    the axis. Nothing is summed over the data axis, where all ranks hold the same gradients.
    """

    _collective: Collective
    _guard: StepGuard | None

    def _prepare_norms(self, inventory: Inventory, communicators: Communicators, groups: list[tuple[str, ...]]) -> None:
        """Chooses, out of the engine's groups, those over which pieces are summed."""
        self._norm_inventory = inventory
        self._varying = [communicators.varying(role) for role in inventory.roles]
        # The ranks may hold different weights, so all sum over whatever any rank has pieces of.
        model = set(communicators.model_axes)
        self._norm_axes = [axes for axes in groups if set(axes) <= model]
        self._norm_groups = {axes: communicators.over(axes) for axes in self._norm_axes}
        doubles = any(p.dtype in (torch.float64, torch.complex128) for p in inventory.parameters)
        self._wide = self._collective.any(doubles) if self._norm_axes else doubles

    @property
    def holds_pieces(self) -> bool:
        """Whether some weights differ between model ranks, so that a norm needs communication."""
        return bool(self._norm_axes)

    def grad_norm(self, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0) -> Tensor:
        """The norm of all reduced gradients as one vector of the whole model. Called by all ranks.

        Args:
            parameters: Those of one optimizer; all of the module if not given. The same choice on all ranks.
            norm_type: p of the p-norm, or ``inf``.

        Returns:
            A scalar, equal on all ranks; float64 if some parameter is, else float32.
        """
        norm_type = float(norm_type)
        parameters = self._chosen(parameters)
        if self._guard is not None:
            self._guard.refuse_unreduced("a gradient norm", parameters)
        infinite = math.isinf(norm_type)
        with self._collective._own_program():
            terms = self._local_terms(parameters, norm_type)
        if isinstance(terms, Tensor):
            return terms
        total = terms[()]
        for axes in self._norm_axes:
            part = terms[axes]
            self._norm_groups[axes].all_reduce_(part, "max" if infinite else "sum")
            total = torch.maximum(total, part) if infinite else total + part
        # Different groups may round differently, and one factor must hold everywhere.
        if len(self._norm_axes) > 1:
            self._collective.broadcast_(total)
        norm = torch.where(total[1] > 0, torch.nan, total[0]) if infinite else total[0] ** (1.0 / norm_type)
        return norm.to(torch.float64 if self._wide else torch.float32)

    def _local_terms(
        self, parameters: Iterable[nn.Parameter], norm_type: float
    ) -> Tensor | dict[tuple[str, ...], Tensor]:
        """What this rank's weights contribute, by the axes over which it is summed; the norm itself if by none."""
        infinite = math.isinf(norm_type)
        terms: dict[tuple[str, ...], list[Tensor]] = {axes: [] for axes in [(), *self._norm_axes]}
        chosen = [p for p in parameters if p.grad is not None and p.grad.numel()]
        gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
        if not self._norm_axes and all(not g.is_sparse and g.dtype.itemsize >= 4 for g in gradients):
            return torch.nn.utils.get_total_norm(gradients, norm_type)
        for parameter, gradient in zip(chosen, gradients, strict=True):
            i = self._norm_inventory.index.get(id(parameter))
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not values.numel():
                continue
            dtype = torch.float32 if values.dtype.itemsize < 4 else None
            norm = torch.linalg.vector_norm(values, norm_type, dtype=dtype).to(torch.float64)
            axes = self._varying[i] if i is not None and self._norm_axes else ()
            terms[axes].append(norm if infinite else norm**norm_type)
        return {axes: _joined(norms, infinite, self._collective.device) for axes, norms in terms.items()}

    def clip_grad_norm_(
        self, max_norm: float, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Scales the reduced gradients down so that their norm is at most ``max_norm``; as `torch.nn.utils` does.

        Called by all ranks, with the same choice of parameters. Gradients below the threshold stay as they are.

        Returns:
            The norm before, equal on all ranks.
        """
        chosen = self._chosen(parameters)
        norm = self.grad_norm(chosen, norm_type)
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
        return norm

    def unscale_(self, scaler: Any, optimizer: Optimizer) -> None:
        """`GradScaler.unscale_`, after which all ranks know if any of them found a value that is not finite.

        Called by all ranks, for each optimizer in the same order.
        """
        scaler.scale(torch.zeros((), device=self._collective.device))  # a rank without a loss has not started it yet
        scaler.unscale_(optimizer)
        self.share_found_inf(scaler, optimizer)

    def share_found_inf(self, scaler: Any, optimizer: Optimizer) -> None:
        """Makes all ranks skip the step together if one of them must. Called by all ranks, after unscaling."""
        if self._collective.world_size == 1 or not scaler.is_enabled():
            return
        found: dict[torch.device, Tensor] = scaler._found_inf_per_device(optimizer)
        if not found:  # no gradient on this rank; it steps, or not, with the others
            found[self._collective.device] = torch.zeros(1, device=self._collective.device)
        own = torch.stack([value.reshape(()).to(self._collective.device) for value in found.values()]).max()
        own = own.reshape(1).clone()
        self._collective.all_reduce_(own, "max")
        for value in found.values():
            value.fill_(own.item())

    def _chosen(self, parameters: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
        return self._norm_inventory.parameters if parameters is None else list(parameters)


def _joined(terms: list[Tensor], infinite: bool, device: torch.device) -> Tensor:
    """The terms' sum, or (for inf) their largest and whether one is NaN, which backends' max may lose."""
    if not terms:
        return torch.zeros(2, dtype=torch.float64, device=device)
    stacked = torch.stack([term.to(device) for term in terms])
    if not infinite:
        return torch.stack([stacked.sum(), torch.zeros_like(stacked[0])])
    return torch.stack([stacked.masked_fill(stacked.isnan(), 0.0).max(), stacked.isnan().any().to(stacked.dtype)])
