"""When an operation is differentiable, when it refuses, and how it behaves under other parts of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import NotApplicable, check

_MESH = {"data": -1, "model": 2}


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


@check("all_gather", "all_reduce", "reduce", "broadcast")
def without_to_the_copies_gradients_are_summed(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    total = n * (n + 1) / 2
    for name, call, wanted in (
        ("all_gather", lambda x: collective.all_gather(x), total),
        ("all_reduce", lambda x: collective.all_reduce(x), total),
        ("reduce", lambda x: collective.reduce(x), total / n),
        ("broadcast", lambda x: collective.broadcast(x), total if rank == 0 else 0.0),
    ):
        x = _ones(2)
        (call(x) * (1 + rank)).sum().backward()
        expect.close(x.grad, np.full(2, wanted), torch.float32, name, 1e-6)


@check("all_gather", "all_reduce", "reduce", "broadcast", world_sizes=(4,), mesh=_MESH)
def a_gradient_over_another_axis_needs_to(collective: Collective, expect: Expect) -> None:
    for group in (collective["model"], collective, collective.split(0)):
        for name in ("all_gather", "all_reduce", "reduce", "broadcast"):
            call: Any = getattr(group, name)
            words = f"{name} to= replicate invariant detach"
            expect.raises(ValueError, words, lambda: call(_ones(2)), f"{name} over {group.name}")
            expect.same(call(torch.ones(2)).requires_grad, False, f"{name} without gradient")
            with torch.no_grad():
                expect.same(call(_ones(2)).requires_grad, False, f"{name} under no_grad")
            expect.same(call(_ones(2), to="invariant").requires_grad, True, f"{name} with to=")
    x = _ones(1)
    (collective["data"].all_gather(x) * (1 + collective.rank)).sum().backward()
    wanted = 4.0 if collective.rank % 2 == 0 else 6.0  # ranks 0 and 2 weigh with 1 and 3, ranks 1 and 3 with 2 and 4
    expect.close(x.grad, np.full(1, wanted), torch.float32, "the data axis has a default")


@check("gather", "reduce", "all_reduce", "reduce_scatter", "send", "recv")
def operations_without_gradient_refuse_at_the_call(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    calls: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("gather", "gather all_gather detach", lambda: collective.gather(_ones(n))),
        ("reduce to a rank", "reduce all_reduce detach", lambda: collective.reduce(_ones(n), dst=0)),
        *(
            (f"all_reduce {op}", f"{op} detach", lambda op=op: collective.all_reduce(_ones(n), op))
            for op in ("max", "min", "prod")
        ),
        *(
            (f"reduce {op}", f"{op} detach", lambda op=op: collective.reduce(_ones(n), op))
            for op in ("max", "min", "prod")
        ),
        ("reduce_scatter max", "max detach", lambda: collective.reduce_scatter(_ones(n), "max")),
    )
    for name, words, call in calls:
        expect.raises(ValueError, words, call, name)
        with torch.no_grad():
            call()
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("send", "recv", world_sizes=(2,))
def send_and_recv_have_no_gradient(collective: Collective, expect: Expect) -> None:
    peer = 1 - collective.rank
    expect.raises(ValueError, "send gradient detach", lambda: collective.send(_ones(1), peer), "send")
    expect.raises(ValueError, "recv gradient", lambda: collective.recv(_ones(1), peer), "recv")
    expect.raises(ValueError, "itself", lambda: collective.send(torch.ones(1), collective.rank), "send to oneself")


@check("all_gather", "all_reduce", "shift")
def detached_inputs_give_detached_results(collective: Collective, expect: Expect) -> None:
    x = _ones(2)
    for call in (collective.all_gather, collective.all_reduce, collective.shift):
        expect.same(call(x.detach()).requires_grad, False, f"{call.__name__} of x.detach()")
        expect.same(call(torch.ones(2)).requires_grad, False, f"{call.__name__} of plain data")
        expect.same(call(x).requires_grad, True, f"{call.__name__} of x")
    mixed = collective.all_gather({"a": x, "b": torch.ones(2), "c": torch.ones(2, dtype=torch.int64)})
    expect.same([mixed[key].requires_grad for key in "abc"], [True, False, False], "a dict with and without gradient")


@check("all_gather")
def second_derivatives_cross_ranks(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    x = torch.full((1,), 2.0 + rank, requires_grad=True)
    (first,) = torch.autograd.grad((collective.all_gather(x) ** 3).sum(), x, create_graph=True)
    value = 2.0 + rank
    expect.close(first, np.full(1, n * 3 * value**2), torch.float32, "gradient of the cubes", 1e-6)
    (first**2).sum().backward()
    # d/dx of g^2 is 2 g dg/dx; through the gathered copies the ranks' terms 2 g meet: g' is n * 6 x.
    expect.close(
        x.grad, np.full(1, 2 * n * 3 * value**2 * n * 6 * value), torch.float32, "gradient of its square", 1e-6
    )


@check("all_gather", "all_reduce")
def recomputation_gives_the_same_gradients(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    total = n * (n + 1) / 2

    def block(z: Tensor) -> Tensor:
        gathered: Tensor = collective.all_gather(z * z).sum() * (1 + rank)
        return gathered + collective.all_reduce(z).sum()

    for mode in (None, False, True):
        x = torch.full((2,), 1.0 + rank, requires_grad=True)
        y = block(x) if mode is None else checkpoint(block, x, use_reentrant=mode)
        y.backward()
        expect.close(x.grad, np.full(2, total * 2 * (1 + rank) + n), torch.float32, f"use_reentrant={mode}", 1e-6)


@check("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
def autocast_changes_nothing(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.full((n,), 1.0 + rank, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            results = collective.all_reduce(x), collective.all_gather(x, 0), collective.reduce_scatter(x)
            uneven = collective.all_gather(x.detach()[:rank], 0, ragged=True)
            exchanged = collective.all_to_all(x)
            (exchanged.sum() + results[1].sum()).backward()
        expect.same([y.dtype for y in (*results, uneven, exchanged)], [dtype] * 5, f"dtypes of {dtype}")
        expect.close(x.grad, np.full(n, n + 1.0), dtype, f"gradient of {dtype}")
        expect.close(results[0], np.full(n, n * (n + 1) / 2), dtype, f"sum of {dtype}")


@check("all_reduce", "all_gather", "shift")
def transforms_of_torch_func_are_right_or_refused(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    total = n * (n + 1) / 2
    x, weight = torch.full((2,), 1.0 + rank), 1.0 + rank
    for name, call in (("all_reduce", collective.all_reduce), ("all_gather", collective.all_gather)):
        gradient = torch.func.grad(lambda t: (call(t) * weight).sum())(x)
        expect.close(gradient, np.full(2, total), torch.float32, f"torch.func.grad of {name}", 1e-6)
        act = lambda: torch.func.vmap(call)(torch.ones(2, 2))  # noqa: E731
        expect.raises((NotImplementedError, TypeError), "vmap refused", act, f"{name} under vmap")
        for transform in (torch.func.grad, torch.func.vmap):
            act = lambda: transform(lambda t: collective.all_reduce(t, "max").sum())(x)  # noqa: E731
            expect.raises(Exception, "", act, f"all_reduce max under {transform.__name__}")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("all_reduce", "all_gather")
def forward_mode_derivatives_are_right(collective: Collective, expect: Expect) -> None:
    if collective.ranks_in_tests != "process":
        raise NotApplicable("torch has one level of forward-mode differentiation per process, which the ranks share")
    x = torch.full((2,), 1.0 + collective.rank)
    for name, call in (("all_reduce", collective.all_reduce), ("all_gather", collective.all_gather)):
        values = call(x)
        tangent = torch.func.jvp(call, (x,), (x,))[1]
        expect.close(tangent, values.numpy(), torch.float32, f"torch.func.jvp of {name}", 1e-6)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(call(forward_ad.make_dual(x, x)))
            expect.close(dual.tangent, values.numpy(), torch.float32, f"forward mode of {name}", 1e-6)
