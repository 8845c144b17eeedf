"""The checker of spmd_types follows our collectives through the examples, and finds what is missing in them.

Needs the extra ``collective_strategy[typecheck]``; ``tox run -e typecheck`` runs it.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from collective_strategy.collectives import OPERATIONS, redistribute, scale_grad
from collective_strategy.testing import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import clip_loss
import domain_parallel_convolution
import moe_dispatch
import ring_attention
import sequence_parallel_mlp
import tensor_parallel_mlp

LETTERS = {"replicate": "R", "invariant": "I", "varying": "V", "partial": "P"}


# Each returns a module, the types of its weights (by a part of their name, else invariant), its inputs, which are
# varying unless said otherwise, and what to make of its result: a loss that is invariant, so that backward may start.


def tensor_parallel(collective):
    block = tensor_parallel_mlp.TensorParallelBlock(tensor_parallel_mlp.Block().double(), collective)
    return block, {"up": "V", "down.weight": "V"}, [("I", random(5, 6))], lambda y: y.square().sum()


def sequence_parallel(collective):
    sizes = sequence_parallel_mlp.near_even(7, collective.world_size)
    block = sequence_parallel_mlp.SequenceParallelBlock(sequence_parallel_mlp.Block().double(), collective, sizes)
    return block, {"up": "V", "down_weight": "V"}, [("V", random(sizes[collective.rank], 6))], summed(collective)


def ring(collective):
    whole = ring_attention.SelfAttention(causal=False).double()
    return ring_attention.RingSelfAttention(whole, collective), {}, [("V", random(4, 8))], summed(collective)


def causal_ring(collective):
    whole = ring_attention.SelfAttention(causal=True).double()
    return ring_attention.RingSelfAttention(whole, collective), {}, [("V", random(4, 8))], summed(collective)


def experts(collective):
    whole = moe_dispatch.MixtureOfExperts(collective.world_size).double()
    layer = moe_dispatch.ExpertParallel(whole, collective)
    return layer, {"expert": "V"}, [("V", random(4, 4))], summed(collective)


def convolutions(collective):
    whole = domain_parallel_convolution.network("circular").double()
    layers = domain_parallel_convolution.parallelize(whole, collective)
    return layers, {}, [("V", random(1, 3, 4 + collective.rank, 6))], summed(collective)


def contrastive(collective):
    towers = clip_loss.TwoTowers(5, 6, 4).double()
    loss = clip_loss.LocalRowsLoss(collective)

    def mean_loss(embedded):
        return collective.all_reduce(loss(*embedded), "mean", to="invariant")

    # Averaged gradients: every rank's copy of the weights goes on to samples of its own.
    return towers, {"": "R"}, [("V", random(3, 5)), ("V", random(3, 6))], mean_loss


# Tensors that a module makes itself, such as the causal mask, have no types, which only the permissive checker accepts.
EXAMPLES = {
    tensor_parallel: "strict",
    sequence_parallel: "strict",
    ring: "strict",
    causal_ring: "permissive",
    experts: "strict",
    convolutions: "strict",
    contrastive: "permissive",
}


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def summed(collective):
    return lambda y: collective.all_reduce(y.square().sum(), to="invariant")


def axis_of(collective):
    import spmd_types

    stride = collective.ranks[1] - collective.ranks[0]
    return spmd_types.MeshAxis.of(collective.world_size, stride)


def typed(collective, tensor, letter):
    import spmd_types

    return spmd_types.assert_type(tensor, {axis_of(collective): getattr(spmd_types, letter)})


def type_of(collective, tensor):
    import spmd_types

    return str(spmd_types.get_axis_local_type(tensor, axis_of(collective)).value)


def checked(collective, example, mode):
    """Type of the loss and the gradients of the weights, under the checker (or, without a mode, not)."""
    from contextlib import nullcontext

    from spmd_types.checker import typecheck

    torch.manual_seed(0)
    module, weights, inputs, loss_of = example(collective)
    for name, parameter in module.named_parameters():
        typed(collective, parameter, next((letter for part, letter in weights.items() if part in name), "I"))
    with typecheck(mode) if mode else nullcontext():
        loss = loss_of(module(*[typed(collective, x, letter) for letter, x in inputs]))
        kind = type_of(collective, loss) if mode else None
        loss.backward()
    return kind, [parameter.grad.tolist() for parameter in module.parameters()]


def results(ranks, function, *arguments, **settings):
    return [outcome.result() for outcome in run_ranks(ranks, function, *arguments, **settings)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_an_example_has_right_types_and_the_same_gradients_as_without_the_checker(example, ranks):
    with_checker = results(ranks, checked, example, EXAMPLES[example])
    assert [kind for kind, _ in with_checker] == ["I"] * ranks
    assert with_checker == [("I", gradients) for _, gradients in results(ranks, checked, example, None)]


@pytest.mark.parametrize("mode", ["strict", "permissive"])
@pytest.mark.parametrize("example", [tensor_parallel, sequence_parallel, ring, experts, convolutions])
def test_forgetting_f_is_found(example, mode):
    def without_f(collective):
        collective.replicate = lambda x: x
        return checked(collective, example, mode)

    for outcome in run_ranks(2, without_f):
        assert type(outcome.error).__name__ == "SpmdTypeError"
        assert "Invariant type" in str(outcome.error)


def test_a_gather_whose_gradient_is_not_summed_is_found():
    def invariant(collective):
        all_gather = collective.all_gather
        collective.all_gather = lambda x, dim, sizes, to: all_gather(x, dim, sizes=sizes, to="invariant")
        return checked(collective, sequence_parallel, "strict")

    for outcome in run_ranks(2, invariant):
        assert "Invariant type" in str(outcome.error)


def test_a_loss_that_differs_by_rank_has_no_backward():
    def local_loss(collective):
        module, weights, inputs, _ = ring(collective)
        return checked(collective, lambda _: (module, weights, inputs, lambda y: y.square().sum()), "strict")

    for outcome in run_ranks(2, local_loss):
        assert type(outcome.error).__name__ == "SpmdTypeError"


CALLS = {
    "all_gather": lambda c, x, to: c.all_gather(x, to=to),
    "broadcast": lambda c, x, to: c.broadcast(x, to=to),
    "all_reduce": lambda c, x, to: c.all_reduce(x, to=to),
    "reduce_scatter": lambda c, x, _: c.reduce_scatter(x),
    "scatter": lambda c, x, _: c.scatter(x),
    "all_to_all": lambda c, x, _: c.all_to_all(x),
    "replicate": lambda c, x, _: c.replicate(x),
    "shard": lambda c, x, of: c.shard(x, of=of),
    "shift": lambda c, x, _: c.shift(x),
    "permute": lambda c, x, _: c.permute(x, [(0, 1), (1, 0)]),
    "halo_exchange": lambda c, x, _: c.halo_exchange(x, 0, 1),
}
PAIRS = [(row.name, choice, pair) for row in OPERATIONS for choice, pair in row.pairs]


@pytest.mark.parametrize(("name", "choice", "pair"), PAIRS, ids=[f"{name}-{choice}" for name, choice, _ in PAIRS])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_every_pair_has_the_types_of_the_table(name, choice, pair, requires_grad):
    def types(collective):
        from spmd_types.checker import typecheck

        x = typed(collective, random(2, 2).detach().requires_grad_(requires_grad), LETTERS[pair.source])
        wrong = typed(collective, random(2, 2), "I" if pair.source != "invariant" else "V")
        with typecheck():
            result = type_of(collective, CALLS[name](collective, x, choice))
            with pytest.raises(RuntimeError, match="SPMD type mismatch"):
                CALLS[name](collective, wrong, choice)
        return result, type_of(collective, x)

    assert results(2, types) == [(LETTERS[pair.destination], LETTERS[pair.source])] * 2


def test_varying_values_are_the_parts_of_a_sum_and_stay_varying():
    def types(collective):
        from spmd_types.checker import typecheck

        x = typed(collective, random(2), "V")
        with typecheck():
            total = collective.all_reduce(x, to="invariant")
            parts = redistribute(x, collective, "varying", "partial")
        return [type_of(collective, each) for each in (x, total, parts)]

    assert results(2, types) == [["V", "I", "P"]] * 2


def test_functions_made_from_the_operations_have_types_too():
    def types(collective):
        from spmd_types.checker import typecheck

        x = typed(collective, random(2), "R")
        with typecheck():
            return type_of(collective, redistribute(scale_grad(x, 0.5), collective, "replicate", "partial"))

    assert results(2, types) == ["P"] * 2


def test_axes_of_a_mesh_have_types_of_their_own():
    def types(collective):
        import spmd_types
        from spmd_types.checker import typecheck

        data, model = collective["data"], collective["model"]
        block, weights, inputs, _ = tensor_parallel(model)
        for name, parameter in block.named_parameters():
            typed(model, parameter, next((letter for part, letter in weights.items() if part in name), "I"))
            typed(data, parameter, "R")
        (_, x), *_ = inputs
        spmd_types.assert_type(x, {axis_of(model): spmd_types.I, axis_of(data): spmd_types.V})
        with typecheck():
            loss = data.all_reduce(block(x).square().mean(), "mean", to="invariant")
            loss.backward()
        return type_of(model, loss), type_of(data, loss)

    assert results(4, types, mesh={"data": 2, "model": 2}) == [("I", "I")] * 4


def test_calls_without_types_work_under_the_checker():
    def calls(collective):
        from spmd_types.checker import typecheck

        with typecheck():
            collective.barrier()
            return (
                collective.exchange_sizes(collective.rank),
                collective.any(collective.rank == 1),
                collective.all_gather_object(f"rank {collective.rank}"),
            )

    assert results(2, calls) == [([0, 1], True, ["rank 0", "rank 1"])] * 2


def test_ranks_at_unequal_distances_are_refused():
    def uneven(collective):
        from spmd_types.checker import typecheck

        group = collective.split("some" if collective.rank != 2 else None)
        if group.is_member:
            with typecheck(), pytest.raises(NotImplementedError, match=r"equal distances, got \[0, 1, 3\]"):
                group.all_reduce(random(2), to="invariant")
        return True

    assert results(4, uneven) == [True] * 4


def test_the_example_of_the_page_finds_a_forgotten_f():
    page = (Path(__file__).parents[2] / "docs" / "compile_and_transforms.md").read_text()
    (code,) = re.findall(r"```python\n(import spmd_types.*?)```", page, re.DOTALL)
    (message,) = re.findall(r"```\nSpmdTypeError: (.*?)```", page, re.DOTALL)

    def right_and_wrong(collective):
        block, _, [(_, x)], _ = tensor_parallel(collective)
        exec(code, {"collective": collective, "block": block, "x": x})
        collective.replicate = lambda x: x
        with pytest.raises(RuntimeError) as found:
            exec(code, {"collective": collective, "block": block, "x": random(5, 6)})
        return str(found.value)

    assert all(text.startswith(message) for text in results(2, right_and_wrong))


def test_nothing_is_imported_without_the_checker():
    def imported(collective):
        module, _, [(_, x)], loss_of = tensor_parallel(collective)
        loss_of(module(x)).backward()
        return "spmd_types" in sys.modules

    assert results(2, imported, fresh=True) == [False, False]
