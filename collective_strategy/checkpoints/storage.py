"""The directory of a checkpoint: what is written becomes visible at once, when it is complete.

::

    last.ckpt/
        checkpoint.json        names the save that counts; replaced in one step, when the new save is complete
        README.txt
        save-3f2a.../          one save
            manifest.json
            rank-0.weights.pt ...

A new directory is made under another name beside its place, and renamed. Where a file system has no renaming (object
stores), the write of ``checkpoint.json`` is the one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collective_strategy.checkpoints.errors import CheckpointError
from collective_strategy.checkpoints.folders import POINTER, README, SAVE_PREFIX, Folder, LocalFolder, folder

FORMAT, VERSION = "collective_strategy.checkpoint", 1
README_TEXT = """\
A checkpoint of a model that several ranks hold together, written by collective_strategy.

Load it with trainer.fit(..., ckpt_path=<this directory>), at this or another number of ranks.
One ordinary file, for torch.load and other tools:

    python -m collective_strategy.checkpoints consolidate <this directory> <file>
"""


def is_checkpoint(path: Any) -> bool:
    """Whether there is a complete checkpoint directory at ``path``; True through a link, too."""
    return folder(path).size(POINTER) is not None


def hidden_name(name: str) -> str:
    """A name beside a file or directory while it is written.

    It must not contain the name: Lightning looks for checkpoints by parts of names.
    """
    return f".unfinished-{hashlib.sha256(name.encode()).hexdigest()[:12]}-{uuid.uuid4().hex[:12]}"


class Saving:
    """One save to a path, on the rank that coordinates: begin, let the ranks write, commit or give up."""

    def __init__(self, path: str) -> None:
        self.target = folder(path)
        self.state = self.target.state()
        if self.state == "file":
            raise CheckpointError(
                f"There is a file at {path}, and a checkpoint of several model ranks is a directory. It is left alone:"
                " remove it, or save under another name."
            )
        if self.state == "directory":
            raise CheckpointError(
                f"There is a directory at {path} that is no checkpoint of this package. It is left alone: remove it, or"
                " save under another name."
            )
        self._beside = isinstance(self.target, LocalFolder) and self.state != "checkpoint"
        root = self.target
        if self._beside:
            parent, name = os.path.split(self.target.path)
            root = LocalFolder(os.path.join(parent, hidden_name(name)))
        self._root = root
        self._name = SAVE_PREFIX + uuid.uuid4().hex[:12]

    @property
    def place(self) -> str:
        """The directory that the ranks write to."""
        return self._root.join(self._name).path

    def begin(self) -> None:
        """Makes the directory that the ranks write to; nothing refers to it yet."""
        self._root.join(self._name).make()

    def commit(self) -> None:
        """Makes the save the one that counts."""
        root = self._root
        if isinstance(root, LocalFolder):
            LocalFolder(self.place).sync()
        if root.size(README) is None:
            root.write_text(README, README_TEXT)
        root.write_text(POINTER, json.dumps({"format": FORMAT, "version": VERSION, "save": self._name}, indent=1))
        if self._beside:
            if self.state == "link":  # the link goes, what it points to stays
                os.unlink(self.target.path)
            os.rename(root.path, self.target.path)
            LocalFolder(os.path.dirname(self.target.path)).sync()
        self._clean()

    def give_up(self) -> None:
        """Removes what was written. Never raises."""
        try:
            if self._beside:
                self._root.remove()
            else:
                self._root.remove(self._name)
        except OSError:  # the error that led here matters more
            pass

    def _clean(self) -> None:
        """Removes older saves, and what killed ones left."""
        for name in self.target.names():
            if name.startswith(SAVE_PREFIX) and name != self._name:
                self.target.remove(name)
        if isinstance(self.target, LocalFolder):
            parent, name = os.path.split(self.target.path)
            prefix = hidden_name(name).rpartition("-")[0]
            for left in LocalFolder(parent).names():
                if left.startswith(prefix):
                    LocalFolder(parent).remove(left)


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """A name to write a local file under, which then takes the place of ``path``, whole or not at all.

    Raises:
        CheckpointError: a checkpoint directory is in the way.
    """
    if LocalFolder(path).state() in ("checkpoint", "directory"):
        raise CheckpointError(
            f"There is a directory at {path}, and this checkpoint is one file. It is left alone: remove it, or save"
            " under another name."
        )
    parent, name = os.path.split(os.path.abspath(path))
    # in the same directory, because a rename between file systems is a copy
    temporary = os.path.join(parent, hidden_name(name))
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        LocalFolder(parent).sync()
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def write_file(data: Any, path: str) -> None:
    """`torch.save` to one local file, which is complete or not there."""
    with replacing(path) as temporary:
        os.makedirs(os.path.dirname(temporary), exist_ok=True)
        with open(temporary, "wb") as file:  # torch.save itself refuses names that begin with a dot
            torch.save(data, file)


def remove_checkpoint(path: Any) -> None:
    """Removes a checkpoint directory, from the pointer on, so that a half-removed one is none. A link goes alone."""
    target = folder(path)
    if isinstance(target, LocalFolder):
        if os.path.islink(target.path):
            os.unlink(target.path)
            return
        parent, name = os.path.split(target.path)
        hidden = os.path.join(parent, hidden_name(name))
        os.rename(target.path, hidden)
        LocalFolder(hidden).remove()
        return
    target.remove(POINTER)
    target.remove()


def current_save(path: Any) -> Folder:
    """The directory of the save that counts.

    Raises:
        CheckpointError: no checkpoint, or one of another format or version.
    """
    root = folder(path)
    text = root.read_text(POINTER)
    if text is None:
        raise CheckpointError(
            f"There is no complete checkpoint at {path}: it has no {POINTER}, which is written last. Give the path of"
            " one that is complete."
        )
    try:
        pointer = json.loads(text)
        form, version, name = pointer["format"], pointer["version"], pointer["save"]
    except (ValueError, KeyError, TypeError):
        form, version, name = None, None, ""
    if form != FORMAT:
        raise CheckpointError(f"{path}/{POINTER} is not that of a checkpoint of this package. Give another path.")
    if version != VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has version {version}; this release reads version {VERSION}. Load it with the"
            " release of collective_strategy that wrote it (manifest.json names it)."
        )
    return root.join(name)
