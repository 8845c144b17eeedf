"""What a domain split over the ranks needs: borders of the neighbours, and the lengths of the others' pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from collective_strategy.collectives import Collective, CollectiveMismatchError
from collective_strategy.testing.conformance.arrays import DTYPES, patterns, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check


@check("halo_exchange")
def borders_come_from_the_neighbours(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in DTYPES:
        inputs = [patterns(dtype, (2, 3 + other, 2), other) for other in range(n)]
        arrays = [raw(x) for x in inputs]
        nothing = raw(torch.zeros(2, 3, 2, dtype=dtype))
        for width in (0, 1, (2, 1), (0, 3)):
            before, after = (width, width) if isinstance(width, int) else width
            for wrap in (False, True):
                left = arrays[rank - 1] if wrap or rank > 0 else nothing
                right = arrays[(rank + 1) % n] if wrap or rank < n - 1 else nothing
                wanted = np.concatenate([left[:, left.shape[1] - before :], arrays[rank], right[:, :after]], 1)
                extended = collective.halo_exchange(inputs[rank], 1, width, wrap=wrap)
                expect.bits(extended, wanted, dtype, f"{dtype}, width {width}, wrap {wrap}")


@check("halo_exchange")
def a_convolution_over_pieces_is_the_one_over_the_whole(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    whole = torch.arange(12.0 * n).reshape(1, 1, -1).sin().requires_grad_()
    kernel = torch.tensor([[[0.5, -2.0, 3.0]]])
    expected = torch.nn.functional.conv1d(whole, kernel, padding=1)
    (expected**2).sum().backward()
    piece = whole.detach()[..., 12 * rank : 12 * (rank + 1)].clone().requires_grad_()
    result = torch.nn.functional.conv1d(collective.halo_exchange(piece, 2, 1), kernel)
    (result**2).sum().backward()
    own = slice(12 * rank, 12 * (rank + 1))
    expect.close(result, expected.detach()[..., own].numpy(), torch.float32, "the convolution", 1e-6)
    assert whole.grad is not None
    expect.close(piece.grad, whole.grad[..., own].numpy(), torch.float32, "its gradient", 1e-6)


@check("halo_exchange")
def wrong_borders_are_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(2, 3)
    wrong: Any
    for wrong in (4, (0, 4), -1, (1, -1)):
        act = lambda: collective.halo_exchange(x, 1, wrong)  # noqa: E731
        expect.raises(ValueError, "halo_exchange", act, f"width {wrong!r}")
    for wrong in (1.0, None, "1", (1, 1, 1), (1.0, 1), True):
        act = lambda: collective.halo_exchange(x, 1, wrong)  # noqa: E731
        expect.raises((TypeError, ValueError), "width", act, f"width {wrong!r}")
    expect.raises(ValueError, "dim 2", lambda: collective.halo_exchange(x, 2, 1), "a wrong dim")
    expect.raises(ValueError, "dim", lambda: collective.halo_exchange(torch.tensor(1.0), 0, 1), "no dims")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("halo_exchange", world_sizes=(2, 3, 4), check=True)
def pieces_that_do_not_fit_together_are_refused(collective: Collective, expect: Expect) -> None:
    n = collective.world_size
    x = torch.ones(2 if collective.rank == 0 else 3, 4)
    act = lambda: collective.halo_exchange(x, 1, 1)  # noqa: E731
    expect.raises(CollectiveMismatchError, "halo_exchange rank", act, "another dim differs")
    act = lambda: collective.halo_exchange(x, 0, 1, wrap=collective.rank == 0)  # noqa: E731
    expect.raises(CollectiveMismatchError, "wrap=True wrap=False", act, "wrap differs")
    expect.bits(collective.all_reduce(torch.ones(1)), np.full(1, n), torch.float32, "the next call")


@check("exchange_sizes")
def sizes_are_exchanged_as_python_ints(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    expect.same(collective.exchange_sizes(10 + rank), [10 + k for k in range(n)], "one length per rank")
    sent = [[10 * source + target for target in range(n)] for source in range(n)]
    expect.same(collective.exchange_sizes(sent[rank]), [row[rank] for row in sent], "a length for each")
    expect.same(collective.exchange_sizes(0), [0] * n, "zeros")
    wrong: Any
    for wrong in (-1, True, [1] * (n + 1), [-1] * n, [1.5] * n):
        act = lambda: collective.exchange_sizes(wrong)  # noqa: E731
        expect.raises((ValueError, TypeError), "", act, f"{wrong!r}")
    for wrong in (1.5, "1", None):
        act = lambda: collective.exchange_sizes(wrong)  # noqa: E731
        expect.raises(TypeError, "", act, f"{wrong!r}")
    expect.same(collective.exchange_sizes(1), [1] * n, "the next call")
