"""Collectives of any picklable object. Sizes may differ; a failure to pickle on one rank raises on all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collective_strategy.collectives import transport
from collective_strategy.collectives.arguments import rank_argument
from collective_strategy.collectives.base import CollectiveBase, Plan
from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.collectives.host import host_copy

_OK, _FAILED = 1, 0


class ObjectOperations(CollectiveBase):
    """The methods whose names end in ``_object``.

    Objects travel pickled through host memory, so large tensors belong into the tensor operations. Tensors inside
    arrive on the CPU. Only communicate with ranks you trust: unpickling runs code.
    """

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The list of every rank's object, in rank order; nesting and types are kept."""
        result: list[Any] = self._run(
            "all_gather_object", lambda: self._plan_all_gather_object("all_gather_object", obj)
        )
        return result

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The list of every rank's object on rank ``dst``, None elsewhere."""

        def plan() -> Plan:
            root = rank_argument(self, "dst", dst)
            status, payload = _pickled(obj)
            return Plan(
                lambda: self._gather_payloads(status, payload, root), f"gather_object(dst={root})", nbytes=len(payload)
            )

        result: list[Any] | None = self._run("gather_object", plan)
        return result

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``; what other ranks give does not matter (None will do)."""

        def plan() -> Plan:
            root = rank_argument(self, "src", src)
            status, payload = _pickled(obj) if self.rank == root else (_OK, b"")

            def run() -> Any:
                if self.world_size == 1:
                    return self._unpickled([(status, payload)])[0]
                header = torch.tensor([status, len(payload)], dtype=torch.int64, device="cpu")
                status_there, length = transport.broadcast(self, header, root).tolist()
                data = _tensor(payload) if self.rank == root else torch.zeros(length, dtype=torch.uint8, device="cpu")
                received = transport.broadcast(self, data, root)
                return self._unpickled([(status_there, _bytes(received))], first_rank=root)[0]

            return Plan(run, f"broadcast_object(src={root})", nbytes=len(payload))

        return self._run("broadcast_object", plan)

    def scatter_object(self, objs: Sequence[Any] | None, src: int = 0) -> Any:
        """Entry ``rank`` of the list that rank ``src`` gives; what other ranks give does not matter (None will do)."""

        def plan() -> Plan:
            root = rank_argument(self, "src", src)
            payloads = [(_OK, b"")] * self.world_size
            if self.rank == root:
                if objs is None or isinstance(objs, (str, bytes)) or not isinstance(objs, Sequence):
                    raise TypeError(
                        f"scatter_object: rank {root} must give a list with one object per rank, got "
                        f"{type(objs).__name__}."
                    )
                if len(objs) != self.world_size:
                    raise ValueError(f"scatter_object: got {len(objs)} objects for {self.world_size} ranks.")
                payloads = [_pickled(obj) for obj in objs]

            def run() -> Any:
                failed = [payload for status, payload in payloads if status == _FAILED]
                own = [(_FAILED, failed[0])] * self.world_size if failed else payloads
                header = torch.tensor(
                    [[status, len(payload)] for status, payload in own], dtype=torch.int64, device="cpu"
                )
                status, length = transport.scatter(self, header, root, 0, (1,) * self.world_size)[0].tolist()
                flat = _tensor(b"".join(payload for _, payload in own))
                here = self.rank == root
                out = [len(payload) if here else 0 for _, payload in own]
                into = [length if peer == root else 0 for peer in range(self.world_size)]
                received = transport.exchange(self, flat, out, into)
                return self._unpickled([(status, _bytes(received))], first_rank=root)[0]

            return Plan(run, f"scatter_object(src={root})", nbytes=sum(len(payload) for _, payload in payloads))

        return self._run("scatter_object", plan)

    def _plan_all_gather_object(self, name: str, obj: Any) -> Plan:
        status, payload = _pickled(obj)
        return Plan(lambda: self._gather_payloads(status, payload, None), f"{name}()", nbytes=len(payload))

    def _gather_payloads(self, status: int, payload: bytes, dst: int | None) -> list[Any] | None:
        header = torch.tensor([status, len(payload)], dtype=torch.int64, device="cpu")
        table = transport.all_gather(self, header).tolist()
        lengths = [row[1] for row in table]
        failed = any(row[0] == _FAILED for row in table)
        data = _tensor(payload)
        if dst is None or failed:  # everybody must hear of a failure
            joined = transport.all_gather_cat(self, data, 0, lengths)
        else:
            out = [len(payload) if peer == dst else 0 for peer in range(self.world_size)]
            joined = transport.exchange(self, data, out, lengths if self.rank == dst else [0] * self.world_size)
            if self.rank != dst:
                return None
        parts = [_bytes(part) for part in joined.split(lengths)]
        return self._unpickled([(row[0], part) for row, part in zip(table, parts, strict=True)])

    def _unpickled(self, payloads: Sequence[tuple[int, bytes]], first_rank: int = 0) -> list[Any]:
        failures = [
            f"rank {first_rank + index}: {data.decode()}"
            for index, (status, data) in enumerate(payloads)
            if status == _FAILED
        ]
        if failures:
            raise CollectiveError(
                f"{self._current}: an object could not be pickled, so no rank got anything: {'; '.join(failures)}. "
                "Send its parts, or make its class picklable. The collective stays usable."
            )
        try:
            return [pickle.loads(data) for _, data in payloads]
        except Exception as error:
            raise CollectiveError(
                f"{self._current}: rank {self.rank} could not rebuild an object it received: {type(error).__name__}: "
                f"{error}. Its class must be importable on every rank."
            ) from error


class _Pickler(pickle.Pickler):
    """Moves tensors to the CPU, where every rank can load them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type != "cpu":
            return host_copy(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickled(obj: Any) -> tuple[int, bytes]:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:  # classes raise anything while they are pickled
        return _FAILED, f"{type(obj).__name__}: {type(error).__name__}: {error}".encode()
    return _OK, buffer.getvalue()


def _tensor(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.zeros(0, dtype=torch.uint8, device="cpu")
    )


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
