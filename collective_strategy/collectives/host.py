"""Tensors of any device, on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """The value on the host, detached; the tensor itself where it is there already.

    Complex numbers travel as pairs: torch_xla drops the imaginary part of complex128 on the way.
    """
    tensor = tensor.detach()
    if tensor.is_complex() and tensor.device.type != "cpu":
        return torch.view_as_complex(torch.view_as_real(tensor.resolve_conj()).cpu())
    return tensor.cpu()
