"""`verify`: are copies equal bit for bit? Where not, which, on which ranks, by how much; and the repair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from collective_strategy.collectives.collective import Collective
from collective_strategy.collectives.errors import CollectiveError
from collective_strategy.gradients.fingerprint import TensorEntry, agree_in_groups
from collective_strategy.gradients.inventory import Communicators
from collective_strategy.inspection.checksums import checksums, joined, plain
from collective_strategy.inspection.replica_report import ReplicaDifference, ReplicaDriftError, ReplicaReport
from collective_strategy.inspection.replicas import Replica, replicas_of
from collective_strategy.sharing.roles import UnmarkedPolicy


def verify(
    module: nn.Module,
    collective: Collective,
    *,
    buffers: bool = True,
    optimizers: Iterable[Optimizer] = (),
    repair: bool = False,
    unmarked: UnmarkedPolicy = "private",
    communicators: Communicators | None = None,
) -> ReplicaReport:
    """Compares all copies bit for bit: over the data axis, and over the axes that a weight is marked `shared` on.

    Called by all ranks, between steps; all come to the same result. Where all is well, one small all-gather is sent.
    NaN in the same places is no difference; weights with NaN or infinities are listed in the report.

    Args:
        module: Its parameters, tied ones once.
        collective: All ranks, with their mesh.
        buffers: Compare buffers too. Those that each rank updates by itself, such as running statistics, differ until
            they are made equal.
        optimizers: Compare their states too, those of a weight's shape and numbers as the weight is, others and the
            groups' settings over the data axis.
        repair: Overwrite copies that differ, with the values that most ranks hold; among equally many with finite
            values before others, and with those of the first rank. Pieces and private weights are never touched.
        unmarked: What a weight without a mark is on the model axes.
        communicators: The groups of a `GradientReducer`, to use them again.

    Returns:
        The report; with ``repair=True`` it says what was changed.

    Raises:
        ReplicaDriftError: on all ranks, when copies differ and ``repair`` is false; ``error.report`` has the data.
        CollectiveMismatchError: on all ranks, when the ranks do not hold the same tensors.

    Example:
        >>> verify(model, collective, optimizers=[optimizer])
    """
    collective._require_usable("verify")
    communicators = communicators or Communicators(collective)
    replicas: list[Replica] = []
    refusal: Exception | None = None
    try:
        replicas = replicas_of(module, communicators, unmarked, buffers=buffers, optimizers=optimizers)
    except ValueError as error:
        refusal = error
    sums = checksums([replica.tensor for replica in replicas])
    not_finite = [r.name for r, (_, finite) in zip(replicas, sums, strict=True) if not finite and r.kind == "parameter"]
    axes = _suspicious_axes(communicators, replicas, sums, refusal)
    differences: list[ReplicaDifference] = []
    if axes:
        _refuse_different_models(communicators, replicas)
        suspects = _suspects(communicators, replicas, sums, axes)
        differences = _compare(communicators, replicas, sums, suspects, repair)
    nbytes = sum(replica.tensor.numel() * replica.tensor.element_size() for replica in replicas)
    report = ReplicaReport(tuple(differences), tuple(not_finite), len(replicas), nbytes, repair)
    if differences and not repair:
        raise ReplicaDriftError(report)
    return report


def _suspicious_axes(
    communicators: Communicators,
    replicas: Sequence[Replica],
    sums: Sequence[tuple[int, bool]],
    refusal: Exception | None,
) -> list[str]:
    """The axes along which some ranks' copies, or their names and shapes, differ; equal on all ranks."""
    world = communicators.world
    wide = [axis for axis, size in communicators.sizes.items() if size > 1]
    if world.world_size == 1:
        if refusal is not None:
            raise refusal
        return []
    own = [0 if refusal is None else 1]
    for axis in wide:
        mine = [(replica, total) for replica, (total, _) in zip(replicas, sums, strict=True) if axis in replica.axes]
        own.append(joined([_entry(replica) for replica, _ in mine]))
        own.append(joined([total for _, total in mine]))
    # a public operation, which in check mode names a rank that does not come
    gathered: Tensor = world.all_gather(torch.tensor(own, dtype=torch.int64, device=world.device))
    table = gathered.tolist()
    refused = [rank for rank, row in enumerate(table) if row[0]]
    if refusal is not None:
        raise refusal
    if refused:
        raise CollectiveError(f"verify: rank {refused[0]} refused its model and says why; nothing was compared.")
    found = []
    for place, axis in enumerate(wide):
        columns = slice(2 * place + 1, 2 * place + 3)
        firsts = (communicators.members((axis,), rank)[0] for rank in range(world.world_size))
        if any(table[rank][columns] != table[first][columns] for rank, first in enumerate(firsts)):
            found.append(axis)
    return found


def _refuse_different_models(communicators: Communicators, replicas: Sequence[Replica]) -> None:
    groups: dict[tuple[int, ...], list[TensorEntry]] = {}
    for replica in replicas:
        groups.setdefault(communicators.members(replica.axes), []).append(_entry(replica))
    if communicators.replicated_data:
        groups.setdefault(communicators.members(communicators.replicated_data), [])
    agree_in_groups(communicators.world, groups, "", "tensor")


def _entry(replica: Replica) -> TensorEntry:
    tensor = replica.tensor
    return TensorEntry(
        replica.name,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        False,
        f"a {replica.kind}, equal over {', '.join(replica.axes)}",
    )


def _suspects(
    communicators: Communicators,
    replicas: Sequence[Replica],
    sums: Sequence[tuple[int, bool]],
    axes: Sequence[str],
) -> list[str]:
    """Names of the tensors that differ somewhere, in an order that is equal on all ranks."""
    here: set[str] = set()
    communicators.prepare({(axis,) for axis in axes})
    for axis in axes:
        group = communicators.over((axis,))
        mine = [
            (replica.name, total) for replica, (total, _) in zip(replicas, sums, strict=True) if axis in replica.axes
        ]
        if not mine:
            continue  # so it is on all ranks of this group
        gathered = torch.empty((group.world_size, len(mine)), dtype=torch.int64, device=group.device)
        group.all_gather_(gathered, torch.tensor([total for _, total in mine], dtype=torch.int64, device=group.device))
        differs = (gathered != gathered[0]).any(0).tolist()
        here |= {name for (name, _), flag in zip(mine, differs, strict=True) if flag}
    order = {replica.name: place for place, replica in enumerate(replicas)}
    everywhere: dict[str, None] = {}
    for names in communicators.world.all_gather_object(sorted(here, key=order.__getitem__)):
        everywhere.update(dict.fromkeys(names))
    return list(everywhere)


def _compare(
    communicators: Communicators,
    replicas: Sequence[Replica],
    sums: Sequence[tuple[int, bool]],
    suspects: Sequence[str],
    repair: bool,
) -> list[ReplicaDifference]:
    """Measures, and with ``repair`` mends, the suspects. Called by all ranks."""
    world = communicators.world
    here = {replica.name: (replica, sums[i]) for i, replica in enumerate(replicas)}
    own = {name: (here[name][0].axes, here[name][1]) for name in suspects if name in here}
    held: list[dict[str, tuple[tuple[str, ...], tuple[int, bool]]]] = world.all_gather_object(own)
    communicators.prepare({axes for rank in held for axes, _ in rank.values()})
    measured: dict[tuple[str, int], tuple[float, int, ReplicaDifference]] = {}
    for name in suspects:
        for members, axes in _groups(communicators, held, name):
            classes = _classes(name, members, held)
            reference = classes[0]
            if len(classes) == 1 or world.rank not in members:
                continue
            replica = here[name][0]
            source = members.index(reference[0])
            values = _sent(communicators.over(axes), replica.tensor, source)
            largest, count = _difference(replica.tensor, values)
            if world.rank not in reference and count:
                measured[name, members[0]] = (
                    largest,
                    count,
                    ReplicaDifference(
                        name,
                        replica.kind,
                        _differing_axes(communicators, axes, classes),
                        tuple(world.ranks[rank] for rank in reference),
                        (),
                        0.0,
                        0,
                        tuple(replica.tensor.shape),
                    ),
                )
                if repair:
                    replica.write(values.to(replica.tensor.device).reshape(replica.tensor.shape))
    merged: dict[tuple[str, int], ReplicaDifference] = {}
    for rank, found in enumerate(world.all_gather_object(measured)):
        for key, (largest, count, difference) in found.items():
            merged[key] = merged.get(key, difference).including(world.ranks[rank], largest, count)
    order = {name: place for place, name in enumerate(suspects)}
    return [merged[key] for key in sorted(merged, key=lambda key: (order[key[0]], key[1]))]


def _groups(
    communicators: Communicators, held: Sequence[Mapping[str, tuple[tuple[str, ...], object]]], name: str
) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """The groups of ranks that hold copies of a tensor, and their axes."""
    found = {communicators.members(rank[name][0], r): rank[name][0] for r, rank in enumerate(held) if name in rank}
    return sorted(found.items())


def _classes(
    name: str, members: Sequence[int], held: Sequence[Mapping[str, tuple[object, tuple[int, bool]]]]
) -> list[list[int]]:
    """The ranks by what they hold; those whose values count as right come first."""
    by_sum: dict[int, list[int]] = {}
    finite: dict[int, bool] = {}
    for rank in members:
        total, is_finite = held[rank][name][1]
        by_sum.setdefault(total, []).append(rank)
        finite[total] = is_finite
    order = sorted(by_sum, key=lambda total: (-len(by_sum[total]), not finite[total], by_sum[total][0]))
    return [by_sum[total] for total in order]


def _differing_axes(
    communicators: Communicators, axes: Sequence[str], classes: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    place = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    return tuple(
        axis
        for axis in axes
        if any(len({place[other] for other in communicators.members((axis,), rank)}) > 1 for rank in place)
    )


@torch.no_grad()
def _sent(group: Collective, tensor: Tensor, source: int) -> Tensor:
    """The tensor of one rank of the group, bit by bit, in a new tensor."""
    data = tensor.detach()
    data = data.to_dense() if data.layout is not torch.strided else data
    data = torch.view_as_real(data.resolve_conj()) if data.is_complex() else data
    words = data.resolve_neg().contiguous().reshape(-1).view(torch.uint8).to(group.device, copy=True)
    if words.numel():
        group.broadcast_(words, source)
    values = words.clone().view(data.dtype).reshape(data.shape)
    return torch.view_as_complex(values) if tensor.is_complex() else values


@torch.no_grad()
def _difference(one: Tensor, other: Tensor) -> tuple[float, int]:
    """The largest difference, and how many elements differ in their bits; two NaN are equal."""
    a, b = plain(one), plain(other.to(one.device))
    if not a.numel():
        return 0.0, 0
    width = min(a.dtype.itemsize, 4)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    bits = [t.contiguous().reshape(-1, 1).view(words) for t in (a, b)]
    differs = (bits[0] != bits[1]).any(1)
    x, y = a.reshape(-1)[differs].to(torch.float64), b.reshape(-1)[differs].to(torch.float64)
    both = x.isnan() & y.isnan()
    x, y = x[~both], y[~both]
    if not x.numel():
        return 0.0, 0
    largest = (x - y).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    count = x.numel() if not one.is_complex() else int((differs.reshape(-1, 2).any(1)).sum())
    return float(largest), count
