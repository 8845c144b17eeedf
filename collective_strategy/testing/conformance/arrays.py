"""Inputs that every rank can make for all ranks, and their values as numpy arrays, from which expectations are made."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = SIGNED + UNSIGNED
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)

_BITS_OF_WIDTH = {1: torch.uint8, 2: torch.int16}


def raw(x: Tensor) -> np.ndarray:
    """The values; those of a dtype that numpy lacks as their bits."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if x.dtype is torch.bfloat16 or (x.dtype.is_floating_point and x.dtype.itemsize == 1):
        x = x.contiguous().view(_BITS_OF_WIDTH[x.dtype.itemsize])
    return np.array(x.numpy())  # a copy: the tensor may be changed later


def numbers(dtype: torch.dtype, shape: tuple[int, ...], rank: int, name: str = "") -> Tensor:
    """Different values for each rank and name; few enough bits that sums of some ranks are exact in every dtype."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), rank])
    whole = generator.integers(0, 13, shape)
    if dtype is torch.bool:
        return torch.from_numpy(np.asarray(whole % 2 == 0))
    if dtype.is_complex:
        other = generator.integers(-6, 7, shape)
        return torch.from_numpy(np.asarray((whole - 6) / 2 + 1j * other / 4)).to(dtype)
    if dtype.is_floating_point:
        return torch.from_numpy(np.asarray((whole - 6) / 2)).to(dtype)
    low = 0 if dtype in UNSIGNED else 6
    return torch.from_numpy(np.asarray(whole - low)).to(dtype)


def patterns(dtype: torch.dtype, shape: tuple[int, ...], rank: int, name: str = "") -> Tensor:
    """Arbitrary bits, so that every conversion on the way shows: extremes, NaNs with payload, negative zeros."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), rank, 1])
    if dtype is torch.bool:
        return torch.from_numpy(np.asarray(generator.integers(0, 2, shape) == 1))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8))
    return data.view(dtype).reshape(shape) if size else torch.zeros(shape, dtype=dtype)


def real_numbers(shape: tuple[int, ...], rank: int, name: str = "") -> np.ndarray:
    """Normally distributed float64 values."""
    return np.asarray(np.random.default_rng([zlib.crc32(name.encode()), rank, 2]).standard_normal(shape))
