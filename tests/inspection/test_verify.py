"""Copies that differ are named, measured and mended, alike on all ranks."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from collective_strategy import GradientReducer, private, sharded, shared, verify
from collective_strategy.collectives import CollectiveMismatchError
from collective_strategy.inspection import ReplicaDriftError
from collective_strategy.testing import run_ranks

MESH = {"data": 2, "model": 2}
MODEL_4 = {"data": 1, "model": 4}


def ranks(function, *, n=4, mesh=None, **options):
    return [outcome.result() for outcome in run_ranks(n, function, mesh=mesh or MESH, timeout=20, **options)]


def common(function, **options):
    results = ranks(function, **options)
    assert all(result == results[0] for result in results), results
    return results[0]


def build(collective):
    """Equal over the axes they are shared over; private weights differ between model ranks."""
    torch.manual_seed(collective.rank)
    model = nn.ModuleDict(
        {
            "norm": shared(nn.LayerNorm(64), over="model"),
            "proj": sharded(nn.Linear(4, 2, bias=False), "weight", over="model", dim=0),
            "head": private(nn.Linear(2, 1)),
            "statistics": nn.BatchNorm1d(2, affine=False),
        }
    )
    GradientReducer(model, collective).broadcast_replicas()
    return model


def add(tensor, value, *places):
    with torch.no_grad():
        for place in places:
            tensor[place] += value


def found(model, collective, **options):
    """What an error says, line by line, and whether its report is equal after pickling."""
    try:
        verify(model, collective, **options)
    except ReplicaDriftError as error:
        if pickle.loads(pickle.dumps(error)).report != error.report:
            return ["the report is lost when the error is pickled"]
        return [line.strip() for line in str(error).splitlines() if " differs over " in line]
    return []


def test_equal_copies_are_found_equal_and_private_ones_may_differ():
    def check(collective):
        model = build(collective)
        optimizer = torch.optim.Adam(model.parameters())
        report = verify(model, collective, optimizers=[optimizer])
        return report.ok, str(report)

    text = "All copies are equal: 16 tensors, 614 bytes."
    ok, said = common(check)
    assert ok
    assert re.sub(r"\d+", "_", said) == re.sub(r"\d+", "_", text)


def test_one_element_on_one_rank_is_named_with_ranks_and_size():
    def check(collective):
        model = build(collective)
        if collective.rank == 3:
            add(model["norm"].weight, 2.0**-23, 7)
        return found(model, collective)

    assert common(check) == [
        "norm.weight differs over axes data, model: rank 3 from ranks 0, 1, 2 by at most 1.19e-07 in 1 of 64 elements"
    ]


def test_pieces_are_compared_with_their_copies_only():
    def check(collective):
        model = build(collective)
        if collective.rank == 2:
            add(model["proj"].weight, 1.0, (0, 0), (1, 2))
        if collective.rank == 1:
            model["head"].bias.data += 0.5
        return found(model, collective)

    assert common(check) == [
        "proj.weight differs over axis data: rank 2 from rank 0 by at most 1 in 2 of 8 elements",
        "head.bias differs over axis data: rank 3 from rank 1 by at most 0.5 in 1 of 1 elements",
    ]


def test_most_ranks_count_as_right_also_if_the_first_one_differs():
    def check(collective):
        model = shared(nn.Linear(2, 2, bias=False), over="model")
        nn.init.ones_(model.weight)
        if collective.rank in (0, 3):
            add(model.weight, 1.0 + collective.rank, 0)
        said = found(model, collective)
        report = verify(model, collective, repair=True)
        return said, report.repaired, len(report.differences), model.weight.tolist(), found(model, collective)

    said = ["weight differs over axis model: ranks 0, 3 from ranks 1, 2 by at most 4 in 2 of 4 elements"]
    assert common(check, mesh=MODEL_4) == (said, True, 1, [[1.0, 1.0], [1.0, 1.0]], [])


def test_a_whole_model_row_that_differs_is_a_difference_over_the_data_axis():
    def check(collective):
        model = build(collective)
        if collective.data.rank == 1:
            add(model["norm"].bias, 1.0, 0)
        return found(model, collective)

    assert common(check) == [
        "norm.bias differs over axis data: ranks 2, 3 from ranks 0, 1 by at most 1 in 1 of 64 elements"
    ]


def test_repair_mends_weights_buffers_and_optimizer_states_and_leaves_pieces_alone():
    def check(collective):
        model = build(collective)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        stepped = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if collective.rank == 2:
            add(model["norm"].weight, 1.0, 0)
            add(model["statistics"].running_mean, 1.0, 1)
            add(optimizer.state[model["proj"].weight]["exp_avg"], 1.0, (0, 0))
            optimizer.state[model["proj"].weight]["step"] += 1
            optimizer.param_groups[0]["lr"] = 0.5
        report = verify(model, collective, optimizers=[optimizer], repair=True)
        mended = model.state_dict()
        again = verify(model, collective, optimizers=[optimizer]).ok
        same = all(torch.equal(mended[name], stepped[name]) for name in mended)
        moved = not torch.equal(before["proj.weight"], mended["proj.weight"])
        return [str(d) for d in report.differences], again, same, moved, optimizer.param_groups[0]["lr"]

    said, *rest = common(check)
    assert rest == [True, True, True, 0.001]
    assert said == [
        "norm.weight differs over axes data, model: rank 2 from ranks 0, 1, 3 by at most 1 in 1 of 64 elements",
        "buffer statistics.running_mean differs over axis data: rank 2 from rank 0 by at most 1 in 1 of 2 elements",
        "optimizer 0: lr of group 0 differs over axis data: rank 2 from rank 0 by at most 0.499 in 1 of 1 elements",
        "optimizer 0: proj.weight.exp_avg differs over axis data: rank 2 from rank 0 by at most 1 in 1 of 8 elements",
        "optimizer 0: proj.weight.step differs over axis data: rank 2 from rank 0 by at most 1 in 1 of 1 elements",
    ]


def test_a_learning_rate_that_is_a_tensor_or_differs_on_one_rank():
    def check(collective):
        model = build(collective)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
        fine = verify(model, collective, optimizers=[optimizer]).ok
        if collective.rank == 1:
            optimizer.param_groups[0]["lr"].mul_(2)
        return fine, found(model, collective, optimizers=[optimizer])

    said = "optimizer 0: lr of group 0 differs over axis data: rank 3 from rank 1 by at most 0.5 in 1 of 1 elements"
    assert common(check) == (True, [said])


def test_lbfgs_keeps_vectors_of_all_weights_which_are_equal_over_the_data_axis():
    def check(collective):
        model = build(collective)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        reducer = GradientReducer(model, collective)

        def closure():
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in model.parameters())
            with reducer.backward():
                loss.backward()
            return loss.detach()

        optimizer.step(closure)
        fine = verify(model, collective, optimizers=[optimizer]).ok
        if collective.rank == 1:
            add(optimizer.state[next(iter(optimizer.state))]["old_dirs"][0], 1.0, 0)
        return fine, len(found(model, collective, optimizers=[optimizer]))

    assert common(check, n=2, mesh={"data": 2, "model": 1}) == (True, 1)


def test_nan_on_all_ranks_is_not_drift_but_reported():
    def check(collective):
        model = build(collective)
        add(model["norm"].weight, float("nan"), 3)
        report = verify(model, collective)
        one_sided = copy.deepcopy(model)
        if collective.rank == 0:
            add(one_sided["norm"].weight, float("inf"), 5)
        payload = copy.deepcopy(model)
        if collective.rank == 1:
            bits = payload["norm"].weight.detach().view(torch.int32)
            bits[3] += 1  # another NaN
        repaired = verify(one_sided, collective, repair=True)
        return (
            report.ok,
            report.not_finite,
            str(report).splitlines()[-1],
            [str(d) for d in repaired.differences],
            one_sided["norm"].weight[5].item(),
            verify(payload, collective).ok,
        )

    assert common(check) == (
        True,
        ("norm.weight",),
        "Not all values are finite in: norm.weight.",
        ["norm.weight differs over axes data, model: rank 0 from ranks 1, 2, 3 by at most inf in 1 of 64 elements"],
        1.0,
        True,
    )


def test_of_two_copies_the_finite_one_is_kept():
    def check(collective):
        model = shared(nn.Linear(1, 1, bias=False), over="model")
        nn.init.constant_(model.weight, float("nan") if collective.rank == 0 else 2.0)
        verify(model, collective, repair=True)
        return model.weight.item()

    assert common(check, n=2, mesh={"data": 1, "model": 2}) == 2.0


def test_the_sign_of_zero_is_a_difference():
    def check(collective):
        model = shared(nn.Linear(2, 1, bias=False), over="model")
        nn.init.constant_(model.weight, -0.0 if collective.rank == 0 else 0.0)
        return found(model, collective)

    assert common(check, n=2, mesh={"data": 1, "model": 2}) == [
        "weight differs over axis model: rank 1 from rank 0 by the sign of zero in 2 of 2 elements"
    ]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
]  # fmt: skip


def test_every_dtype_stride_and_size():
    """Buffers of each dtype: the last element differs on rank 1; also transposed, conjugate, empty and large ones."""

    def check(collective):
        model = nn.Module()
        for dtype in DTYPES:
            model.register_buffer(f"of_{str(dtype).removeprefix('torch.')}", torch.zeros(2, 3).to(dtype))
        model.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
        model.register_buffer("conjugate", torch.ones(3, dtype=torch.complex64).conj())
        model.register_buffer("empty", torch.zeros(0, 3))
        model.register_buffer("large", torch.zeros((1 << 22) + (1 << 16) + 3))
        if collective.rank == 1:
            model.transposed = model.transposed.contiguous()  # equal values in another order of memory
        fine = verify(model, collective).ok
        if collective.rank == 1:
            for name, buffer in model.named_buffers():
                if buffer.numel():
                    changed = buffer.clone().contiguous()
                    other = {"transposed": 7.0, "conjugate": 2.0}.get(name, 1.0)
                    changed.view(-1)[-1:] = torch.tensor([other]).to(buffer.dtype)
                    setattr(model, name, changed)
        report = verify(model, collective, repair=True)
        sizes = {(d.elements, d.ranks) for d in report.differences}
        return fine, sizes, [d.name for d in report.differences], verify(model, collective).ok

    fine, sizes, names, mended = common(check, n=2, mesh={"data": 2})
    assert (fine, sizes, mended) == (True, {(1, (1,))}, True)
    assert names == [f"of_{str(d).removeprefix('torch.')}" for d in DTYPES] + ["transposed", "conjugate", "large"]


def test_changes_of_any_one_element_and_of_signs_are_seen():
    from collective_strategy.inspection.checksums import checksums

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        base = (torch.arange(200) % 11).to(dtype)
        seen = {checksums([base])[0]}
        for i in range(200):
            changed = base.clone()
            changed[i] += 1
            seen.add(checksums([changed])[0])
        swapped = base.clone()
        swapped[0], swapped[1] = base[1], base[0]
        seen |= {checksums([swapped])[0], checksums([-base if dtype != torch.uint8 else base.flip(0)])[0]}
        assert len(seen) == 203


def test_all_is_well_costs_one_small_message():
    def check(collective):
        model = build(collective)
        verify(model, collective)
        collective.counters.reset()
        verify(model, collective)
        return {name: count.calls for name, count in collective.counters.as_dict().items() if count.calls}

    assert common(check) == {"all_gather": 1}


def test_ranks_with_different_layers_are_compared_in_what_they_share():
    def check(collective):
        model = build(collective)
        if collective["model"].rank == 1:
            model["extra"] = nn.Linear(3, 3)
            GradientReducer(model, collective).broadcast_replicas()
        else:
            GradientReducer(model, collective).broadcast_replicas()
        fine = verify(model, collective).ok
        if collective.rank == 3:
            add(model["extra"].bias, 1.0, 0)
        return fine, found(model, collective)

    fine, said = common(check)
    assert fine
    assert said == ["extra.bias differs over axis data: rank 3 from rank 1 by at most 1 in 1 of 3 elements"]


def test_a_tensor_that_one_rank_lacks_is_refused_on_all():
    def check(collective):
        model = build(collective)
        if collective.rank == 2:
            model["late"] = nn.Linear(1, 1)
        try:
            verify(model, collective)
        except CollectiveMismatchError as error:
            return str(error).partition(". ")[0]

    assert common(check) == ("The ranks hold different models: rank 2 has tensor late.weight (1, 1) that rank 0 lacks")


def test_a_lazy_module_on_one_rank_is_refused_on_all():
    def check(collective):
        model = nn.LazyLinear(2) if collective.rank == 0 else nn.Linear(2, 2)
        try:
            verify(model, collective)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    first, second = ranks(check, n=2, mesh={"data": 2})
    assert first.startswith("ValueError: parameter weight has no shape yet (a lazy module)")
    assert second.startswith("CollectiveError: verify: rank 0 refused its model and says why")


def test_a_rank_that_does_not_come_is_named():
    def check(collective):
        if collective.rank == 0:
            collective.barrier()
        else:
            verify(nn.Linear(1, 1), collective)

    for outcome in run_ranks(2, check, timeout=20, check=True):
        assert isinstance(outcome.error, CollectiveMismatchError)
        assert "rank 0: barrier" in str(outcome.error)


@pytest.mark.parametrize("mesh", [None, {"data": 1, "model": 1}])
def test_one_process_has_nothing_to_compare(mesh):
    def check(collective):
        return verify(nn.Linear(2, 2), collective).ok

    assert [outcome.result() for outcome in run_ranks(1, check, mesh=mesh, timeout=20)] == [True]


def test_a_data_axis_that_is_a_union():
    def check(collective):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        if collective.rank == 2:
            add(model.weight, 1.0, 0)
        return found(model, collective)

    options = {"mesh": {"rows": 2, "columns": 2}, "data_axis": "batch", "unions": {"batch": ("rows", "columns")}}
    assert common(check, **options) == [
        "weight differs over axes rows, columns: rank 2 from ranks 0, 1, 3 by at most 1 in 1 of 1 elements"
    ]
