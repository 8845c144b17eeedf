"""A directory of files, of this machine or behind fsspec."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from collective_strategy.checkpoints.errors import CheckpointError

POINTER = "checkpoint.json"
SAVE_PREFIX, README = "save-", "README.txt"


class Folder:
    """Files under one directory, local or remote. Names are relative."""

    def __init__(self, path: str) -> None:
        self.path = path

    def join(self, name: str) -> Folder:
        """The directory of this name inside."""
        return type(self)(f"{self.path}/{name}")

    def make(self) -> None:
        """Creates the directory and those above it, unless they are there."""
        raise NotImplementedError

    def write(self, name: str, data: Any) -> int:
        """`torch.save`, on the disk when it returns; the size in bytes."""
        raise NotImplementedError

    def write_text(self, name: str, text: str) -> None:
        """In one step: a reader sees the old text or the new one."""
        raise NotImplementedError

    def read(self, name: str, weights_only: bool | None = True) -> Any:
        """`torch.load` onto the CPU."""
        raise NotImplementedError

    def read_text(self, name: str) -> str | None:
        """None if there is no such file."""
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        """None if there is no such file."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """What is in the directory; empty if there is none."""
        raise NotImplementedError

    def remove(self, name: str = "") -> None:
        """The directory, or one in it, with all that is inside."""
        raise NotImplementedError

    def state(self) -> str:
        """``"nothing"``, ``"link"``, ``"file"``, ``"checkpoint"`` or ``"directory"``."""
        raise NotImplementedError


class LocalFolder(Folder):
    """A directory of this machine, or of a network file system that all ranks see."""

    def make(self) -> None:
        os.makedirs(self.path, exist_ok=True)

    def write(self, name: str, data: Any) -> int:
        with self._synced(name) as file:
            torch.save(data, file)
        return os.path.getsize(self._at(name))

    def write_text(self, name: str, text: str) -> None:
        temporary = f".{name}.{uuid.uuid4().hex}.tmp"
        with self._synced(temporary) as file:
            file.write(text.encode())
        os.replace(self._at(temporary), self._at(name))
        self.sync()

    def read(self, name: str, weights_only: bool | None = True) -> Any:
        try:
            return torch.load(self._at(name), map_location="cpu", mmap=True, weights_only=weights_only)
        except FileNotFoundError:
            raise CheckpointError(_incomplete(self._at(name))) from None

    def read_text(self, name: str) -> str | None:
        try:
            return Path(self._at(name)).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, name: str) -> int | None:
        try:
            return os.path.getsize(self._at(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str = "") -> None:
        shutil.rmtree(self._at(name) if name else self.path, ignore_errors=True)

    def state(self) -> str:
        if os.path.islink(self.path):
            return "link"
        if not os.path.exists(self.path):
            return "nothing"
        if not os.path.isdir(self.path):
            return "file"
        return "checkpoint" if self.size(POINTER) is not None else "directory"

    def sync(self) -> None:
        """Sees to it that the directory's entries survive a power cut."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def _synced(self, name: str) -> Iterator[Any]:
        with open(self._at(name), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)


class RemoteFolder(Folder):
    """A directory behind fsspec, such as ``s3://bucket/run``."""

    def __init__(self, path: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        super().__init__(path)
        self._files, self._root = fsspec.core.url_to_fs(path)

    def make(self) -> None:
        self._files.makedirs(self._root, exist_ok=True)

    def write(self, name: str, data: Any) -> int:
        buffer = io.BytesIO()
        torch.save(data, buffer)
        self._files.pipe_file(self._at(name), buffer.getvalue())
        return buffer.tell()

    def write_text(self, name: str, text: str) -> None:
        self._files.pipe_file(self._at(name), text.encode())

    def read(self, name: str, weights_only: bool | None = True) -> Any:
        try:
            data = self._files.cat_file(self._at(name))
        except FileNotFoundError:
            raise CheckpointError(_incomplete(self._at(name))) from None
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)

    def read_text(self, name: str) -> str | None:
        if not self._files.exists(self._at(name)):
            return None
        text: str = self._files.cat_file(self._at(name)).decode()
        return text

    def size(self, name: str) -> int | None:
        return int(self._files.size(self._at(name))) if self._files.exists(self._at(name)) else None

    def names(self) -> list[str]:
        if not self._files.isdir(self._root):
            return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._root, detail=False)]

    def remove(self, name: str = "") -> None:
        target = self._at(name) if name else self._root
        if self._files.exists(target):
            self._files.rm(target, recursive=True)

    def state(self) -> str:
        if self.size(POINTER) is not None:
            return "checkpoint"
        if self._files.isfile(self._root):
            return "file"
        # what a killed save left does not count
        left = [name for name in self.names() if not name.startswith(SAVE_PREFIX) and name != README]
        return "directory" if left else "nothing"

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


def is_remote(path: Any) -> bool:
    """Whether a path names another protocol than that of local files."""
    return "://" in str(path) and not str(path).startswith(("file://", "local://"))


def folder(path: Any) -> Folder:
    """The directory of a path or URL."""
    if is_remote(path):
        return RemoteFolder(str(path).rstrip("/"))
    text = os.fspath(path) if not isinstance(path, str) else path
    for protocol in ("file://", "local://"):
        text = text.removeprefix(protocol)
    return LocalFolder(os.path.abspath(text))


def _incomplete(path: str) -> str:
    return (
        f"The file {path} of a checkpoint is missing. Every rank must see the whole directory: copy all of it, or put"
        " it on a file system that all machines share."
    )
