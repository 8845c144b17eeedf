"""Each wrong mark is found and named; right ones, and models that need none, raise no alarm."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from collective_strategy import GradientReducer, audit, private, sharded, shared
from collective_strategy.testing import run_ranks

MODEL_2 = {"data": 1, "model": 2}
MESH_2X2 = {"data": 2, "model": 2}


def common(function, *, n=2, mesh=None):
    results = [outcome.result() for outcome in run_ranks(n, function, mesh=mesh or MODEL_2, timeout=30)]
    assert all(result == results[0] for result in results), results
    return results[0]


def batch(*numbers: int) -> Tensor:
    """Tokens of these numbers: (4, 6)."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(hash(numbers) % 2**31))


def layer(kind: Any = nn.Linear, *sizes: int, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return kind(*(sizes or (6, 6)), **options)


def seen(report):
    return {(f.kind, f.level, f.name, f.axis) for f in report.findings}


def look(collective, model, loss=None):
    """Each model rank has tokens of its own, another set in each batch."""

    def step(number):
        result = model(batch(collective.rank, number))
        return (result.square().sum() if loss is None else loss(result)) / 3

    return audit(model, collective, step)


# Mistakes


def test_a_forgotten_mark_is_found():
    def check(collective):
        model = nn.Sequential(shared(layer(), over="model"), layer(seed=1, bias=False))
        report = look(collective, model)
        return report.ok, seen(report), str(report)

    ok, found, text = common(check)
    assert not ok
    assert found == {("forgotten mark", "mistake", "1.weight", "model")}
    _, title, what, weight, advice = text.splitlines()
    assert title == "Mistakes:"
    assert (
        what == "  no mark for axis model, equal on the 2 ranks, but different gradients, so that copies drift apart:"
    )
    assert weight.startswith("    1.weight (by up to ")
    assert advice.startswith("    -> If it is one weight, say shared(module, over='model'), or use collective['model']")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_without_its_mark_is_a_question_as_it_starts_with_ones(norm):
    def check(collective):
        model = nn.Sequential(shared(layer(), over="model"), norm(6))
        fresh = look(collective, model)
        with torch.no_grad():
            model[1].weight.copy_(torch.arange(6.0) + 1)
            if norm is nn.LayerNorm:
                model[1].bias.copy_(torch.arange(6.0) - 1)
        return seen(fresh), seen(look(collective, model))

    fresh, trained = common(check)
    names = ["1.weight", "1.bias"] if norm is nn.LayerNorm else ["1.weight"]
    assert ("forgotten mark", "question", "1.weight", "model") in fresh
    assert norm is nn.RMSNorm or ("not decided", "note", "1.bias", "model") in fresh
    assert trained == {("forgotten mark", "mistake", name, "model") for name in names}


def test_a_sum_of_gradients_that_are_whole_already_is_found():
    """Behind all_reduce(to="invariant") every rank does the same; and replicate() sums in forward already."""

    class Twice(nn.Module):
        def __init__(self, collective):
            super().__init__()
            self.model_axis = collective["model"]
            self.first = shared(layer(), over="model")
            self.second = shared(layer(seed=1), over="model")
            self.third = shared(layer(seed=2, bias=False), over="model")

        def forward(self, x):
            weight, bias = self.model_axis.replicate([self.second.weight, self.second.bias])
            x = functional.linear(torch.tanh(self.first(x)), weight, bias)
            return self.third(self.model_axis.all_reduce(x, to="invariant"))

    def check(collective):
        return seen(look(collective, Twice(collective)))

    names = ["second.weight", "second.bias", "third.weight"]
    assert common(check) == {("reduced twice", "mistake", name, "model") for name in names}


def test_a_weight_marked_over_the_wrong_axis_is_found():
    def check(collective):
        model = nn.Sequential(
            shared(layer(seed=1), over="model"),  # should be space
            nn.Tanh(),
            shared(layer(seed=2), over="space"),
            nn.Tanh(),
            shared(layer(seed=3), over=("model", "space")),  # space only, too
        )
        report = audit(model, collective, lambda k: model(batch(collective["space"].rank, k)).square().sum())
        return seen(report), str(report)

    found, text = common(check, n=4, mesh={"data": 1, "model": 2, "space": 2})
    notes = {("replicated, unmarked", "note", name, "model") for name in ("2.weight", "2.bias")}
    assert found - notes == {
        ("wrong axis", "mistake", "0.weight", "model"),
        ("wrong axis", "mistake", "0.bias", "model"),
        ("reduced twice", "mistake", "4.weight", "model"),
        ("reduced twice", "mistake", "4.bias", "model"),
    }
    assert "Probably the axes are mixed up: say over='space'." in text


def test_none_and_mean_where_gradients_differ():
    def check(collective):
        model = nn.Sequential(
            shared(layer(), over="model", grad="none"), nn.Tanh(), shared(layer(seed=1), over="model", grad="mean")
        )
        return seen(look(collective, model))

    assert common(check) == {
        ("not reduced", "mistake", "0.weight", "model"),
        ("not reduced", "mistake", "0.bias", "model"),
        ("averaged parts", "question", "2.weight", "model"),
        ("averaged parts", "question", "2.bias", "model"),
    }


def test_none_on_a_weight_that_one_rank_leaves_out():
    def check(collective):
        model = nn.ModuleList([shared(layer(bias=False), over="model", grad="none"), shared(layer(), over="model")])

        def step(number):
            result = model[1](batch(collective.rank, number))
            return (model[0](result) if collective.rank == 0 else result).square().sum()

        return seen(audit(model, collective, step))

    assert common(check) == {("not reduced", "mistake", "0.weight", "model")}


def test_copies_that_differ_by_rounding_need_a_mean():
    def check(collective):
        model = shared(layer(bias=False), over="model", grad="none")
        order = [0, 1, 2, 3] if collective.rank == 0 else [3, 1, 0, 2]

        def step(number):
            rows = batch(number)[order]
            return sum(model(row).square().sum() for row in rows)

        (finding,) = audit(model, collective, step).findings
        return finding.kind, "by rounding only (by up to" in str(finding) and "Say grad='mean'" in str(finding)

    assert common(check) == ("not reduced", True)


def test_drifted_copies_and_equal_pieces():
    def check(collective):
        model = nn.Sequential(
            shared(layer(seed=collective.rank), over="model"),
            sharded(layer(seed=1, bias=False), "weight", over="model", dim=0),
        )
        drifted = seen(look(collective, model))
        pieces = sharded(layer(bias=False), "weight", over="model", dim=0)
        copies = audit(pieces, collective, lambda number: pieces(batch(number)).square().sum())
        return drifted, seen(copies)

    drifted, copies = common(check)
    assert drifted == {("copies differ", "mistake", name, "model") for name in ("0.weight", "0.bias")}
    assert copies == {("equal pieces", "mistake", "weight", "model")}


# No alarm


def test_right_marks_raise_no_alarm():
    def check(collective):
        model = nn.Sequential(
            shared(layer(), over="model"),
            shared(nn.LayerNorm(6), over="model"),
            sharded(layer(seed=10 + collective["model"].rank), "*", over="model", dim=0),
            private(nn.LayerNorm(6)),
            layer(seed=20 + collective["model"].rank),
            shared(layer(seed=3), over="model").requires_grad_(False),
        )
        report = look(collective, model)
        return report.ok, seen(report), report.batches, str(report).splitlines()[0]

    for mesh, n in ((MODEL_2, 2), (MESH_2X2, 4)):
        ok, found, batches, text = common(check, n=n, mesh=mesh)
        assert (ok, batches) == (True, 2)
        assert found == {("not decided", "note", "4.bias", "model")} or found == set()
        assert text.endswith("in 2 batches: marks and gradients agree.")


def test_zeros_decide_nothing():
    """Biases that start at zero in private layers, layers without a gradient, a layer that only one rank uses."""

    def check(collective):
        model = nn.ModuleDict(
            {
                "own": layer(seed=collective.rank),
                "unused": layer(seed=5),
                "one": layer(seed=6),
                "idle": shared(layer(seed=7), over="model"),
            }
        )
        nn.init.zeros_(model["own"].bias)

        def step(number):
            x = model["own"](batch(collective.rank, number))
            return (model["one"](x) if collective.rank == 0 else x).square().sum() + 0 * model["idle"](x).sum()

        report = audit(model, collective, step)
        return report.ok, {f.kind for f in report.findings}

    assert common(check) == (True, {"not decided"})


def test_a_gradient_that_does_not_depend_on_the_batch_decides_nothing():
    """The bias of a mean over pixels: each rank's part of its gradient is the number of its pixels."""

    def check(collective):
        model = shared(layer(), over="model")
        report = look(collective, model, loss=lambda result: result.sum())
        return report.ok, seen(report)

    assert common(check) == (True, {("not decided", "note", "bias", "model")})


def test_whole_gradients_without_a_mark_are_only_a_note():
    def check(collective):
        model = layer()
        report = audit(model, collective, lambda number: model(batch(number)).square().sum())
        return report.ok, seen(report), str(report).splitlines()[-1]

    ok, found, text = common(check)
    assert ok
    assert found == {("replicated, unmarked", "note", name, "model") for name in ("weight", "bias")}
    assert text.endswith("shared(..., grad='none') says what they are: weight, bias.")


def test_ranks_with_different_layers():
    def check(collective):
        model = nn.ModuleList([shared(layer(), over="model"), layer(nn.Linear, 6, 2 + collective.rank)])
        if collective.rank == 1:
            model.append(layer(seed=4))

        def step(number):
            x = model[0](batch(collective.rank, number))
            return sum(part(x).square().sum() for part in model[1:])

        report = audit(model, collective, step)
        return report.ok, sorted({e.name for e in report.evidence})

    assert common(check) == (True, ["0.bias", "0.weight"])


def test_without_a_model_axis_there_is_nothing_to_compare():
    def check(collective):
        model = layer()
        return str(audit(model, collective, lambda number: model(batch(number)).sum()))

    text = "Audit of 0 weights over no axis of several ranks in 2 batches: marks and gradients agree."
    assert common(check, mesh={"data": 2}) == text


# No trace


class Restless(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self):
        super().__init__()
        self.linear = shared(layer(), over="model")
        self.norm = private(nn.BatchNorm1d(6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(()))
        self.history, self.by_name, self.count, self.state = [], {"x": [torch.zeros(2)]}, 0, torch.zeros(2)

    def forward(self, x):
        self.calls += 1
        self.rebound = self.rebound + 1
        self.count += 1
        self.state.add_(1)
        self.history.append(self.count)
        self.by_name["x"][0].add_(1)
        self.by_name["y"] = 1
        self.linear.bias.data.clamp_(-0.01, 0.01)
        random.random()
        return functional.dropout(self.norm(self.linear(x)), 0.5)


def state_of(model, optimizer):
    import numpy as np

    return (
        [t.clone() for t in (*model.parameters(), *model.buffers(), model.state, model.by_name["x"][0])],
        [None if p.grad is None else (id(p.grad), p.grad.clone(), p.grad._version) for p in model.parameters()],
        [dict(sorted(optimizer.state[p].items())) for p in model.parameters()],
        (torch.get_rng_state(), random.getstate(), repr(np.random.get_state())),
        (model.count, list(model.history), sorted(model.by_name), model.training),
    )


def equal(one, other):
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_it_leaves_no_trace_and_training_goes_on_as_without_it():
    """In the middle of an accumulation, with a gradient of which a part is not reduced yet."""

    def train(collective, audited):
        torch.manual_seed(3)
        random.seed(3)
        model = Restless()
        reducer = GradientReducer(model, collective)
        optimizer = torch.optim.Adam(model.parameters())
        untouched = True
        for step in range(4):
            with reducer.backward(sync=step % 2 == 1):
                model(batch(collective.rank, step)).square().sum().backward()
            if audited:
                before = state_of(model, optimizer)
                report = audit(model, collective, lambda k: model(batch(collective.rank, 9 + k)).square().sum())
                untouched &= equal(before, state_of(model, optimizer)) and report.ok
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return untouched, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    def check(collective):
        with_audit, plain = train(collective, True), train(collective, False)
        return with_audit[0], equal(with_audit[1:], plain[1:])

    assert common(check) == (True, True)


def test_hooks_that_step_an_optimizer_in_backward_are_set_aside():
    def check(collective):
        model = shared(layer(), over="model")
        fired = []
        model.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
        start = model.weight.detach().clone()
        report = look(collective, model)
        during = len(fired)
        model(batch(0)).sum().backward()
        return report.ok, during, len(fired), torch.equal(start, model.weight)

    assert common(check) == (True, 0, 1, True)


def test_a_step_that_runs_backwards_by_itself_and_reentrant_checkpoints():
    from torch.utils.checkpoint import checkpoint

    def check(collective):
        model = nn.Sequential(shared(layer(), over="model"), nn.Tanh(), layer(seed=1))

        def step(number):
            x = batch(collective.rank, number).requires_grad_()
            for _ in range(2):
                model.zero_grad()
                checkpoint(model, x, use_reentrant=True).square().sum().backward()

        return seen(audit(model, collective, step))

    assert common(check) == {("forgotten mark", "mistake", name, "model") for name in ("2.weight", "2.bias")}


def test_wrong_uses_are_refused():
    def check(collective):
        model = shared(layer(), over="model")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def stepping(number):
            model(batch(number)).sum().backward()
            optimizer.step()

        said = []
        for step, batches in ((stepping, 2), (lambda number: None, 2), (lambda number: None, 1)):
            try:
                audit(model, collective, step, batches=batches)
            except (RuntimeError, ValueError) as error:
                said.append(str(error)[:60])
        model(batch(0)).sum().backward()
        optimizer.step()  # works again
        return said

    assert common(check) == [
        "SGD.step() was called inside an audit, which looks at gradie",
        "audit: the step returned no loss that depends on the module'",
        "audit needs two batches at least, to see which gradients dep",
    ]


def test_a_mark_that_is_wrong_on_one_rank_is_refused_on_all():
    def check(collective):
        model = shared(layer(), over="modle" if collective.rank == 0 else "model")
        audit(model, collective, lambda number: model(batch(number)).sum())

    first, second = (outcome.error for outcome in run_ranks(2, check, mesh=MODEL_2, timeout=30, check=True))
    assert isinstance(first, ValueError)
    assert "rank 0" in str(second)
    assert "the mesh has no model axis 'modle'" in str(second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_dtypes_and_sparse_gradients(dtype):
    def check(collective):
        right, wrong = (shared(layer(dtype=dtype, bias=False), over="model", grad=g) for g in ("sum", "none"))
        model = nn.ModuleList([right, wrong, nn.ParameterList([torch.empty(0, 3, dtype=dtype)])])
        if not dtype.is_complex:
            model.append(shared(layer(nn.Embedding, 5, 6, sparse=True, dtype=dtype), over="model", grad="none"))

        def step(number):
            x = batch(collective.rank, number).to(dtype)
            if not dtype.is_complex:
                x = x + model[3](torch.tensor([collective.rank] * 4))
            return wrong(right(x)).abs().square().sum() + model[2][0].abs().sum()

        return seen(audit(model, collective, step))

    names = ["1.weight"] if dtype.is_complex else ["1.weight", "3.weight"]
    assert common(check) == {("not reduced", "mistake", name, "model") for name in names}
