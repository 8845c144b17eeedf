"""Operations that move values without computing with them: right values, in rank order, for every dtype."""

from __future__ import annotations

import time

import numpy as np
import torch

from collective_strategy.collectives import Collective
from collective_strategy.testing.conformance.arrays import DTYPES, numbers, patterns, raw
from collective_strategy.testing.conformance.expect import Expect
from collective_strategy.testing.conformance.suite import check

SHAPES = ((3,), (2, 3), (), (0,), (2, 0, 3), (1, 1))


@check("all_gather")
def all_gather_stacks_in_rank_order(collective: Collective, expect: Expect) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            inputs = [patterns(dtype, shape, rank) for rank in range(collective.world_size)]
            gathered = collective.all_gather(inputs[collective.rank])
            expect.bits(gathered, np.stack([raw(x) for x in inputs]), dtype, f"{dtype} {shape}")


@check("all_gather")
def all_gather_concatenates_along_a_dim(collective: Collective, expect: Expect) -> None:
    for dtype in DTYPES:
        for dim in (0, 1, 2, -1):
            inputs = [patterns(dtype, (2, 3, 2), rank) for rank in range(collective.world_size)]
            gathered = collective.all_gather(inputs[collective.rank], dim)
            expect.bits(gathered, np.concatenate([raw(x) for x in inputs], dim), dtype, f"{dtype} dim {dim}")


@check("all_gather", "gather", "all_gather_object")
def order_is_by_rank_whenever_ranks_arrive(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for _ in range(2):
        time.sleep(0.03 * (n - 1 - rank))  # the last rank comes first
        expect.bits(collective.all_gather(torch.tensor(rank)), np.arange(n), torch.int64, "all_gather")
        time.sleep(0.03 * (n - 1 - rank))
        expect.same(collective.all_gather_object(rank), list(range(n)), "all_gather_object")
        time.sleep(0.03 * (n - 1 - rank))
        gathered = collective.gather(torch.tensor(rank), n - 1)
        if rank == n - 1:
            expect.bits(gathered, np.arange(n), torch.int64, "gather")


@check("gather")
def gather_to_every_destination(collective: Collective, expect: Expect) -> None:
    for dst in range(collective.world_size):
        for dtype in DTYPES:
            for dim in (None, 0, 1):
                inputs = [patterns(dtype, (2, 3), rank) for rank in range(collective.world_size)]
                gathered = collective.gather(inputs[collective.rank], dst, dim)
                arrays = [raw(x) for x in inputs]
                if collective.rank == dst:
                    wanted = np.stack(arrays) if dim is None else np.concatenate(arrays, dim)
                    expect.bits(gathered, wanted, dtype, f"{dtype} to {dst}, dim {dim}")
                else:
                    expect.same(gathered, None, f"{dtype} to {dst}, on another rank")


@check("broadcast")
def broadcast_from_every_source(collective: Collective, expect: Expect) -> None:
    for src in range(collective.world_size):
        for dtype in DTYPES:
            for shape in SHAPES:
                inputs = [patterns(dtype, shape, rank) for rank in range(collective.world_size)]
                received = collective.broadcast(inputs[collective.rank], src)
                expect.bits(received, raw(inputs[src]), dtype, f"{dtype} {shape} from {src}")


@check("scatter")
def scatter_from_every_source(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for src in range(n):
        for dtype in DTYPES:
            for dim, sizes in ((0, None), (1, None), (-1, None), (1, list(range(n)))):
                shape = [n * 2, n * 2]
                shape[dim] = n * 2 if sizes is None else sum(sizes)
                inputs = [patterns(dtype, tuple(shape), other) for other in range(n)]
                received = collective.scatter(inputs[rank], src, dim, sizes=sizes)
                ends = np.cumsum([2] * n if sizes is None else sizes)[:-1]
                wanted = np.split(raw(inputs[src]), ends, dim)[rank]
                expect.bits(received, wanted, dtype, f"{dtype} from {src}, dim {dim}, sizes {sizes}")


@check("all_to_all")
def all_to_all_exchanges_equal_chunks(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in DTYPES:
        for split_dim, concat_dim in ((0, 0), (1, 1), (0, 1), (1, 0), (-1, 0)):
            inputs = [patterns(dtype, (2 * n, 3 * n), other) for other in range(n)]
            received = collective.all_to_all(inputs[rank], split_dim, concat_dim)
            wanted = np.concatenate([np.split(raw(x), n, split_dim)[rank] for x in inputs], concat_dim)
            expect.bits(received, wanted, dtype, f"{dtype} dims {split_dim} to {concat_dim}")


@check("all_to_all")
def all_to_all_exchanges_chunks_of_given_sizes(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    sent = [[(source + 2 * target) % 3 for target in range(n)] for source in range(n)]
    for dtype in DTYPES:
        inputs = [patterns(dtype, (sum(sent[source]), 2), source) for source in range(n)]
        received_sizes = [sent[source][rank] for source in range(n)]
        received = collective.all_to_all(inputs[rank], sizes=(sent[rank], received_sizes))
        wanted = np.concatenate([np.split(raw(x), np.cumsum(sent[k])[:-1])[rank] for k, x in enumerate(inputs)])
        expect.bits(received, wanted, dtype, f"{dtype} one dim")
    out, into = [1 + target for target in range(n)], [(2 * source) % 3 for source in range(n)]
    inputs = [patterns(torch.float32, (sum(out), into[source]), source) for source in range(n)]
    received = collective.all_to_all(inputs[rank], 0, 1, sizes=(out, into))
    wanted = np.concatenate([np.split(raw(x), np.cumsum(out)[:-1])[rank] for x in inputs], 1)
    expect.bits(received, wanted, torch.float32, "two dims")


@check("shift", "permute")
def shift_and_permute_take_the_value_of_the_source(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in DTYPES:
        inputs = [patterns(dtype, (2, 2), other) for other in range(n)]
        nothing = raw(torch.zeros(2, 2, dtype=dtype))
        for offset in (1, -1, 0, 2, n, -n - 1):
            wanted = raw(inputs[(rank - offset) % n])
            expect.bits(collective.shift(inputs[rank], offset), wanted, dtype, f"{dtype} shift by {offset}")
            wanted = raw(inputs[rank - offset]) if 0 <= rank - offset < n else nothing
            shifted = collective.shift(inputs[rank], offset, wrap=False)
            expect.bits(shifted, wanted, dtype, f"{dtype} shift by {offset} without wrap")
        for pairs in ([], [(0, n - 1)], [(k, n - 1 - k) for k in range(n)], [(n - 1, 0), (0, n // 2)] if n > 2 else []):
            sources = {target: source for source, target in pairs}
            wanted = raw(inputs[sources[rank]]) if rank in sources else nothing
            expect.bits(collective.permute(inputs[rank], pairs), wanted, dtype, f"{dtype} permute {pairs}")


@check("replicate", "shard")
def replicate_and_shard_send_nothing(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    for dtype in DTYPES:
        x = patterns(dtype, (2 * n, 3 * n), 0)
        expect.bits(collective.replicate(x), raw(x), dtype, f"{dtype} replicate")
        for of in ("invariant", "replicate"):
            for dim in (0, 1, -1):
                chunk = collective.shard(x, dim, of=of)
                expect.bits(chunk, np.split(raw(x), n, dim)[rank], dtype, f"{dtype} shard dim {dim} of {of}")
        sizes = [0, *[2] * (n - 2), 2 * n - 2 * max(n - 2, 0)][-n:]
        chunk = collective.shard(x, 0, sizes=sizes)
        expect.bits(chunk, np.split(raw(x), np.cumsum(sizes)[:-1])[rank], dtype, f"{dtype} shard sizes {sizes}")


@check("send", "recv", world_sizes=(2, 3, 4))
def send_and_recv_between_two_ranks(collective: Collective, expect: Expect) -> None:
    if not {"send", "recv"} <= collective.capabilities.primitives:
        x, peer = torch.ones(1), 1 - min(collective.rank, 1)
        for name, call in (("send", lambda: collective.send(x, peer)), ("recv", lambda: collective.recv(x, peer))):
            if name not in collective.capabilities.primitives:
                expect.raises(NotImplementedError, f"no {name} shift", call, f"{name} that the backend does not have")
        return
    first, last = 0, collective.world_size - 1
    for dtype in DTYPES:
        for shape in ((3,), (2, 2), ()):
            for src, dst in ((first, last), (last, first)):
                inputs = [patterns(dtype, shape, rank) for rank in range(collective.world_size)]
                x = inputs[collective.rank]
                if collective.rank == src:
                    collective.send(x, dst)
                elif collective.rank == dst:
                    expect.bits(collective.recv(x, src), raw(inputs[src]), dtype, f"{dtype} {shape} {src} to {dst}")
                    expect.bits(x, raw(inputs[dst]), dtype, "the tensor given to recv")


@check("all_gather", "broadcast", "all_to_all", "reduce_scatter")
def large_tensors_arrive_whole(collective: Collective, expect: Expect) -> None:
    n, rank = collective.world_size, collective.rank
    inputs = [numbers(torch.float32, (n * 20_011,), other) for other in range(n)]
    arrays = [raw(x) for x in inputs]
    x = inputs[rank]
    expect.bits(collective.all_gather(x), np.stack(arrays), x.dtype, "all_gather")
    expect.bits(collective.broadcast(x, n - 1), arrays[-1], x.dtype, "broadcast")
    exchanged = np.concatenate([np.split(array, n)[rank] for array in arrays])
    expect.bits(collective.all_to_all(x), exchanged, x.dtype, "all_to_all")
    expect.close(collective.reduce_scatter(x), np.split(sum(arrays), n)[rank], x.dtype, "reduce_scatter")
