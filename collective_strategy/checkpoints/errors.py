"""The error of this package."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or does not fit; the message names the tensor, file or rank.

    A refused save leaves what was there before. Raised alike on all ranks by what all ranks do together.
    """
