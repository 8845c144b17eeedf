"""Checksums of tensors' bits, computed where the tensors lie."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16
_WIDENED_AT_ONCE = {"cpu": 8, "cuda": 256}  # blocks: 4 MiB, which fit into a cache, and 128 MiB


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[tuple[int, bool]]:
    """A 64-bit checksum of each tensor's bits, and whether all its values are finite. Local.

    Words of up to 32 bits are multiplied by odd numbers that depend on their place, and summed modulo 2**64, so that a
    change of any one element is always seen, and changes of several, or swapped ones, but for a chance of some 2**-33.
    Equal values have equal checksums whatever the strides. There is one wait for the device in all.
    """
    if not tensors:
        return []
    results: list[Tensor] = []
    weights: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        words, finite = _words_and_finite(tensor)
        if words.device not in weights:
            weights[words.device] = _odd(torch.arange(1 << 20, (1 << 20) + _BLOCK, device=words.device))
        results.append(torch.stack([_sum(words, weights[words.device]), finite.to(torch.int64)]))
    by_device: dict[torch.device, list[int]] = {}
    for i, result in enumerate(results):
        by_device.setdefault(result.device, []).append(i)
    values: list[tuple[int, bool]] = [(0, True)] * len(results)
    for members in by_device.values():
        for i, (total, finite_flag) in zip(members, torch.stack([results[i] for i in members]).tolist(), strict=True):
            values[i] = total, bool(finite_flag)
    return values


def joined(parts: Sequence[object]) -> int:
    """One signed 64-bit number for a sequence of names and numbers, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(list(parts)).encode(), digest_size=8).digest(), "little", signed=True)


def plain(tensor: Tensor) -> Tensor:
    """The tensor detached, dense and real, where bits can be looked at."""
    data = tensor.detach()
    if data.device.type not in ("cpu", "cuda"):
        data = data.cpu()  # not every device can look at a number's bits
    if data.layout is not torch.strided:
        data = data.to_dense()
    data = data.resolve_conj().resolve_neg()
    return torch.view_as_real(data) if data.is_complex() else data


def _words_and_finite(tensor: Tensor) -> tuple[Tensor, Tensor]:
    data = plain(tensor)
    finite = torch.ones((), dtype=torch.bool, device=data.device)
    if data.dtype.is_floating_point and data.numel():
        wide = data.float() if data.dtype.itemsize < 2 else data  # float8 has no comparisons
        finite = torch.isfinite(wide).all()
    flat = data.contiguous().reshape(-1)
    width = min(data.dtype.itemsize, 4)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]), finite


def _sum(words: Tensor, weights: Tensor) -> Tensor:
    whole = words.numel() // _BLOCK
    rest = words[whole * _BLOCK :]
    total = (rest.to(torch.int64) * weights[: rest.numel()]).sum()
    if not whole:
        return total
    stride = _WIDENED_AT_ONCE[words.device.type]
    total = total * _odd(torch.tensor(whole, device=words.device))
    for start in range(0, whole, stride):
        blocks = words[start * _BLOCK : min(start + stride, whole) * _BLOCK].view(-1, _BLOCK)
        sums = (blocks.to(torch.int64) * weights).sum(1)
        places = torch.arange(start, start + len(sums), device=words.device)
        total = total + (sums * _odd(places)).sum()
    return total


def _odd(places: Tensor) -> Tensor:
    """Odd pseudo-random numbers by place: the finalizer of SplitMix64 (Steele et al. 2014)."""
    z = (places.to(torch.int64) + 1) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1
