"""Checkpoints that are either complete or not there."""

import os
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO as _TorchCheckpointIO
else:
    _TorchCheckpointIO = object


class AtomicCheckpointBehaviour(_TorchCheckpointIO):
    """Lightning's own checkpoint file, written beside its place and then renamed.

    A process that dies while writing leaves the previous file whole. Remote paths (``s3://...``) are left to
    Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = os.fspath(path)
        # in the same directory, because a rename between file systems is a copy
        temporary = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex}.tmp")
        try:
            super().save_checkpoint(checkpoint, temporary, storage_options)
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, target)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
