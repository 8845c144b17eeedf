"""Expectations that are noted, not raised, so that one rank's failure does not leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collective_strategy.collectives.host import host_copy
from collective_strategy.testing.conformance.arrays import raw

_SHOWN = 8


class Expect:
    """Collects what a check found wrong on one rank."""

    def __init__(self) -> None:
        self._problems: list[str] = []
        self._context = ""

    @contextmanager
    def about(self, context: str) -> Iterator[None]:
        """Puts ``context`` before the problems found inside."""
        before = self._context
        self._context = f"{before}{context}: "
        try:
            yield
        finally:
            self._context = before

    def true(self, condition: object, what: str) -> None:
        """The condition holds."""
        if not condition:
            self._problems.append(self._context + what)

    def same(self, actual: object, expected: object, what: str) -> None:
        """Python values are equal and of one type."""
        if type(actual) is not type(expected) or actual != expected:
            self._problems.append(f"{self._context}{what}: expected {expected!r}, got {actual!r}")

    def bits(self, actual: Any, expected: np.ndarray, dtype: torch.dtype, what: str) -> None:
        """A tensor of this dtype with exactly these values (see `arrays.raw`): NaNs and the sign of zero count."""
        if not self._is_tensor(actual, dtype, expected.shape, what):
            return
        got = raw(actual)
        if got.tobytes() != np.ascontiguousarray(expected).astype(got.dtype).tobytes():
            self._problems.append(f"{self._context}{what}: expected {_short(expected)}, got {_short(got)}")

    def close(self, actual: Any, expected: np.ndarray, dtype: torch.dtype, what: str, rtol: float = 0.0) -> None:
        """A tensor of this dtype, equal to ``expected`` up to ``rtol`` of the largest value."""
        expected = np.asarray(expected)
        if not self._is_tensor(actual, dtype, expected.shape, what):
            return
        wide = torch.complex128 if dtype.is_complex else torch.float64
        got = host_copy(actual).to(wide).numpy()
        scale = float(np.max(np.abs(expected), initial=0.0))
        if not np.allclose(got, expected, rtol=rtol, atol=rtol * scale, equal_nan=True):
            self._problems.append(f"{self._context}{what}: expected {_short(expected)}, got {_short(got)}")

    def raises(
        self,
        kinds: type[BaseException] | tuple[type[BaseException], ...],
        words: str,
        act: Callable[[], Any],
        what: str,
    ) -> str:
        """``act`` raises one of ``kinds`` with all the words (split at spaces) in its message, which is returned."""
        try:
            result = act()
        except kinds as error:
            text = str(error)
            missing = [word for word in words.split() if word.lower() not in text.lower()]
            if missing:
                self._problems.append(f"{self._context}{what}: the error does not say {missing}: {text}")
            return text
        except Exception as error:
            self._problems.append(f"{self._context}{what}: raised {type(error).__name__}: {error}")
            return str(error)
        self._problems.append(f"{self._context}{what}: nothing was raised, the result is {_short(result)}")
        return ""

    def finish(self, note: str = "") -> None:
        """Raises what was found, with a note about what came after it."""
        if self._problems:
            more = len(self._problems) - _SHOWN
            shown = self._problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else []) + ([note] if note else [])
            raise AssertionError("\n".join(shown))

    def _is_tensor(self, actual: Any, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> bool:
        if not isinstance(actual, Tensor):
            self._problems.append(f"{self._context}{what}: expected a tensor, got {_short(actual)}")
        elif actual.dtype != dtype or tuple(actual.shape) != tuple(shape):
            self._problems.append(
                f"{self._context}{what}: expected {dtype} of shape {list(shape)}, got {actual.dtype} of shape "
                f"{list(actual.shape)}"
            )
        else:
            return True
        return False


def _short(value: object) -> str:
    text = np.array2string(value, threshold=12) if isinstance(value, np.ndarray) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 160 else text[:157] + "..."
