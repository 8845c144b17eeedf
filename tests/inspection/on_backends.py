"""What the tools say on a 2 x 2 mesh, the same on every backend."""

from typing import Any

import torch
from torch import nn

from collective_strategy import Collective, GradientReducer, audit, explain, seed_ranks, shared, verify
from collective_strategy.inspection import ReplicaDriftError

MESH = {"data": 2, "model": 2}


def tools_on_a_rank(collective: Collective) -> dict[str, Any]:
    """One element of a shared weight jumps on rank 3; later a weight is marked 'none' whose gradients are parts."""
    torch.manual_seed(collective.rank)
    device = collective.device
    model = nn.ModuleDict(
        {"norm": shared(nn.LayerNorm(6), over="model"), "own": nn.Linear(6, 2), "count": nn.BatchNorm1d(2)}
    ).to(device)
    reducer = GradientReducer(model, collective)
    reducer.broadcast_replicas()
    said: dict[str, Any] = {"equal": verify(model, collective).ok}
    with torch.no_grad():
        if collective.rank == 3:
            model["norm"].weight[2] += 0.5
    try:
        verify(model, collective)
    except ReplicaDriftError as error:
        said["error"] = str(error).splitlines()[1].strip()
    said["mended"] = len(verify(model, collective, repair=True).differences), verify(model, collective).ok
    model["count"].running_mean.fill_(1.0 + collective.data.rank)
    reducer.make_buffers_equal("mean")
    said["mean"] = model["count"].running_mean.tolist()
    said["row"] = explain(model, collective).row("norm.weight").operation

    wrong = shared(nn.Linear(6, 6), over="model", grad="none").to(device)
    GradientReducer(wrong, collective).broadcast_replicas()

    def step(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * number + collective.rank)
        return wrong(torch.randn(4, 6, generator=generator).to(device)).square().sum()

    said["found"] = sorted((f.kind, f.name) for f in audit(wrong, collective, step).findings)
    seed_ranks(collective, 5)
    ones = torch.ones(64, device=device)
    said["drawn"] = torch.rand(1, device=device).item()
    said["mask"] = nn.functional.dropout(ones).tolist()
    with collective["model"].varying_rng():
        said["own mask"] = nn.functional.dropout(ones).tolist()
    said["mask after"] = nn.functional.dropout(ones).tolist()
    return said


def check(ranks: list[dict[str, Any]]) -> None:
    """Compares with what can be said without ranks."""
    for kind, right in {"drawn": [0, 0, 2, 2], "mask": [0, 0, 2, 2], "own mask": [0, 1, 2, 3]}.items():
        drawn = [rank.pop(kind) for rank in ranks]
        assert [drawn.index(value) for value in drawn] == right, kind
    after = [rank.pop("mask after") for rank in ranks]
    assert after[0] == after[1] != after[2] == after[3]
    message = "norm.weight differs over axes data, model: rank 3 from ranks 0, 1, 2 by at most 0.5 in 1 of 6 elements"
    expected = {
        "equal": True,
        "error": message,
        "mended": (1, True),
        "mean": [1.5, 1.5],
        "row": "sum over model, mean over data",
        "found": [("not reduced", "bias"), ("not reduced", "weight")],
    }
    assert ranks == [expected] * 4
