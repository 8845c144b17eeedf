"""The table of weights: what is shown is what the reducer does."""

import math

import pytest
import torch
from torch import nn

from collective_strategy import (
    GradientReducer,
    SingleProcessCollective,
    audit,
    explain,
    private,
    sharded,
    shared,
    verify,
)
from collective_strategy.gradients import BucketSizes
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}


class Model(nn.Module):
    """Every role; one rank of two has a private layer more."""

    def __init__(self, model_rank):
        super().__init__()
        self.encoder = shared(nn.Linear(3, 4), over="model")
        self.norm = shared(nn.LayerNorm(4), over="model", grad="mean")
        self.table = shared(nn.Embedding(5, 4), over="model", grad="none")
        self.proj = sharded(nn.Linear(4, 2, bias=False), "weight", over="model", dim=0)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight
        shared(self.out, over="model", grad="none")
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.statistics = nn.BatchNorm1d(4, affine=False)
        if model_rank == 1:
            self.extra = private(nn.Linear(1, 1))


def ranks(n, function, mesh=None, **options):
    return [outcome.result() for outcome in run_ranks(n, function, mesh=mesh or MESH, timeout=20, **options)]


@pytest.fixture(scope="module")
def explained():
    def build(collective):
        model = Model(collective["model"].rank)
        here, everywhere = explain(model, collective), explain(model, collective, all_ranks=True)
        from rich.console import Console

        console = Console(width=200, record=True)
        with console.capture() as captured:
            console.print(everywhere)
        return here, everywhere, captured.get()

    return ranks(4, build)


def test_each_row_says_what_is_done_with_the_gradient(explained):
    here = explained[1][0]
    assert here.rank == 1
    rows = {row.name: (dict(row.roles).get("model"), row.over, row.operation) for row in here.rows}
    everybody, data = ("data", "model"), ("data",)
    assert rows == {
        "encoder.weight": ("shared, sum", everybody, "sum over model, mean over data"),
        "encoder.bias": ("shared, sum", everybody, "sum over model, mean over data"),
        "norm.weight": ("shared, mean", everybody, "mean over data, model"),
        "norm.bias": ("shared, mean", everybody, "mean over data, model"),
        "table.weight": ("shared, none", data, "mean over data"),
        "proj.weight": ("sharded, dim 0", data, "mean over data"),
        "frozen.weight": ("unmarked", (), "frozen"),
        "statistics.running_mean": ("unmarked", data, "over data"),
        "statistics.running_var": ("unmarked", data, "over data"),
        "statistics.num_batches_tracked": ("unmarked", data, "over data"),
        "extra.weight": ("private", data, "mean over data"),
        "extra.bias": ("private", data, "mean over data"),
    }
    tied = here.row("out.weight")
    assert (tied.name, tied.aliases, tied.shape, tied.elements, tied.nbytes) == (
        "table.weight", ("out.weight",), (5, 4), 20, 80,
    )  # fmt: skip
    with pytest.raises(KeyError, match=r"'absent' is none of \['encoder\.weight'"):
        here.row("absent")


def test_weights_that_some_ranks_have_not_are_marked(explained):
    everywhere = explained[0][1]
    assert everywhere == explained[3][1]
    assert everywhere.rank is None
    assert {row.name: row.ranks for row in everywhere.rows if row.ranks} == {
        "extra.weight": (1, 3),
        "extra.bias": (1, 3),
    }
    text = str(everywhere)
    assert "ranks" in text
    (line,) = [line for line in text.splitlines() if line.startswith("extra.weight")]
    assert line.split() == ["extra.weight", "1,", "3", "1", "x", "1", "float32", "private", "mean", "over", "data", "0",
                            "4"]  # fmt: skip
    assert "208 to 216 bytes" in text  # 4 bytes each of 12 + 4 + 4 + 4 (all four ranks), 20 + 8 and 2 (data ranks)


def test_rich_shows_the_same_cells(explained):
    _, everywhere, rich = explained[0]
    for row in everywhere.rows:
        assert row.name in rich
        assert row.operation in rich
    assert everywhere.title in rich


@pytest.mark.parametrize("sizes", [None, BucketSizes(moved=64, packed=64, first=32)], ids=["default", "small"])
def test_buckets_and_bytes_are_those_of_the_reducer(sizes):
    def build(collective):
        model = Model(0)
        settings = {"sizes": sizes, "reduce_dtype": torch.float64}
        reducer = GradientReducer(model, collective, **settings)
        rows = explain(model, collective, **settings).rows
        found, number = {}, {}
        for bucket in reducer._plan.buckets:
            axes = bucket.route.axes
            number[axes] = number.get(axes, -1) + 1
            names = tuple(sorted(reducer._inventory.names[i] for i in bucket.members))
            found[axes, number[axes]] = names, bucket.nbytes
        told = {}
        for row in rows:
            if row.bucket is not None:
                names, nbytes = told.get((row.over, row.bucket), ((), 0))
                told[row.over, row.bucket] = tuple(sorted([*names, row.name])), nbytes + row.nbytes
        return found, told

    for found, told in ranks(4, build):
        assert found == told
        assert (len(found) > 3) == (sizes is not None)
        assert sum(nbytes for _, nbytes in told.values()) == 8 * (12 + 4 + 4 + 4 + 20 + 8)


def test_one_rank_may_explain_alone():
    def build(collective):
        return str(explain(Model(0), collective)) if collective.rank == 2 else None

    found = ranks(4, build)
    assert found[2].startswith("Weights of rank 2 on the mesh data 2 x model 2; gradients are averaged over data.")


def test_without_a_mesh_and_with_one_process():
    def build(collective):
        return str(explain(nn.Linear(2, 1), collective))

    (two, _), (one,) = ([outcome.result() for outcome in run_ranks(n, build, timeout=20)] for n in (2, 1))
    assert "mean over data" in two
    assert "1 all-reduce of gradients, 12 bytes together" in two
    assert "No gradient is sent." in one
    assert math.prod([line.startswith("weight") for line in one.splitlines()]) == 0


@pytest.mark.parametrize("tool", [explain, verify, lambda *args: audit(*args, lambda number: None)])
def test_before_set_up_the_tools_are_refused(tool):
    with pytest.raises(RuntimeError, match="was called before the collective was set up"):
        tool(nn.Linear(1, 1), SingleProcessCollective())
