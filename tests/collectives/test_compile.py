"""torch.compile around collectives: the same values and gradients, one break of the graph per call."""

import pytest
import torch
from torch import nn

from collective_strategy.collectives import OPERATIONS, SingleProcessCollective
from collective_strategy.collectives.compiling import REASON
from collective_strategy.testing import run_ranks

# By torch, for every compiled graph, with or without collectives: a loud refusal, no wrong number.
TWICE_REFUSED = "does not currently support double backward|donated buffers which requires create_graph=False"


def results(ranks, function, *arguments, **settings):
    """On processes of their own, which the compiler may change as it likes."""
    outcomes = run_ranks(ranks, function, *arguments, fresh=True, timeout=90, **settings)
    return [outcome.result() for outcome in outcomes]


class Layers(nn.Module):
    """Collectives with something to compile before, between and after. The weight differs by rank."""

    def __init__(self, collective):
        super().__init__()
        self.collective = collective
        n = collective.world_size
        generator = torch.Generator().manual_seed(collective.rank)
        self.weight = nn.Parameter(torch.randn(n, n, generator=generator, dtype=torch.float64) / n)

    def forward(self, x):
        c = self.collective
        h = c.all_gather(torch.tanh(x @ self.weight), dim=0, to="replicate")
        h = c.reduce_scatter(h.sin(), dim=0) * self.weight
        h = c.all_to_all(h, split_dim=1, concat_dim=0).exp()
        h = c.shift(h.reshape(x.shape)) * h.reshape(x.shape)
        h = c.all_reduce(torch.tanh(h), "mean", to="replicate") * self.weight
        return c.all_reduce(h.sin().sum(), to="invariant").exp()


class OtherLayers(Layers):
    """The same with the other operations."""

    def forward(self, x):
        c = self.collective
        h = torch.tanh(x @ c.replicate(self.weight))
        h = c.all_gather(h, to="invariant").sigmoid()
        h = c.shard(h, dim=0).squeeze(0) * self.weight
        h = h + c.broadcast(h.sin(), src=1, to="replicate") * self.weight
        h = h + c.scatter(torch.cat([h, h.cos()]), src=1).exp()
        h = c.halo_exchange(h, 1, 1).square()
        return c.all_reduce(h.sin().sum(), to="invariant").exp()


def input_of(collective):
    n = collective.world_size
    x = torch.linspace(-1, 1, n * n, dtype=torch.float64).reshape(n, n) + collective.rank
    return x.requires_grad_()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize(
    ("ranks", "layers", "compiler"),
    [
        (2, Layers, "inductor"),
        (2, Layers, "aot_eager"),
        (3, Layers, "aot_eager"),
        (2, OtherLayers, "aot_eager"),
        (3, Layers, "eager"),
        (2, OtherLayers, "eager"),
    ],
)
def test_a_compiled_module_has_the_values_and_gradients_of_the_module(ranks, layers, compiler):
    def compare(collective):
        module = layers(collective)
        compiled = torch.compile(module, backend=compiler)
        for _ in range(2):  # compiled in the first round, reused in the second
            pairs = []
            for call in (module, compiled):
                x = input_of(collective)
                y = call(x)
                pairs.append((y.detach(), *torch.autograd.grad(y, (x, module.weight))))
            assert all(float(each.abs().max()) > 1e-6 for each in pairs[0]), "the comparison would not notice much"
            close(*pairs)

        def twice(call):
            x = input_of(collective)
            (first,) = torch.autograd.grad(call(x), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), (x, module.weight))

        if compiler == "eager":
            return close(twice(compiled), twice(module))
        with pytest.raises(RuntimeError, match=TWICE_REFUSED):
            twice(compiled)
        return True

    assert all(results(ranks, compare))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_gradients_of_gradients_by_torch_func_can_be_compiled(compiler):
    """With the compiler "eager", torch 2.13 fails on any uncompiled function inside ``torch.func.grad``."""

    def compare(collective):
        module = Layers(collective)

        def penalty(x):
            return torch.func.grad(module)(x).square().sum()

        x = input_of(collective).detach()
        ours = torch.compile(torch.func.grad(penalty), backend=compiler)(x)
        y = input_of(collective)
        (first,) = torch.autograd.grad(module(y), y, create_graph=True)
        return close(ours, torch.autograd.grad(first.square().sum(), y)[0])

    assert all(results(2, compare))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_operations_in_place_and_their_handles(compiler):
    def compare(collective):
        def in_place(x):
            x = x.sin() * 2
            collective.all_reduce_(x)
            everyone = torch.empty(collective.world_size, *x.shape, dtype=x.dtype)
            collective.all_gather_(everyone, x + collective.rank)
            first = everyone.cos()
            handle = collective.broadcast_(first, src=1, async_op=True)
            other = x.exp()
            handle.wait()
            own = torch.empty_like(x)
            collective.reduce_scatter_(own, everyone * 3)
            return x + 1, everyone * 2, first.sin(), own.tanh(), other

        x = input_of(collective).detach()
        return close(torch.compile(in_place, backend=compiler)(x), in_place(x))

    assert all(results(2, compare))


def test_axes_of_a_mesh_and_containers():
    def compare(collective):
        def mean(x):
            parts = collective["model"].all_reduce({"a": x.sin(), "b": [x.cos()]}, to="invariant")
            return collective.data.all_reduce(parts["a"] * parts["b"][0], "mean")

        x = input_of(collective).detach()
        return close(torch.compile(mean, backend="aot_eager")(x), mean(x))

    assert all(results(4, compare, mesh={"data": 2, "model": 2}))


def test_new_shapes_and_lengths_known_at_run_time_only():
    def compare(collective):
        def exchanged(x, sent):
            received = collective.exchange_sizes(sent)
            return collective.all_to_all(x.sin(), sizes=(sent, received)).cos()

        compiled = torch.compile(exchanged, backend="aot_eager")
        for sent in ([2, 1], [0, 3], [1, 0]):
            x = torch.arange(float(sum(sent)))
            close(compiled(x, sent), exchanged(x, sent))
        return True

    assert all(results(2, compare))


GATHERED, SCATTERED = torch.empty(1, 1, 2), torch.empty(2)
CALLS = {
    "barrier": lambda c, x: c.barrier(),
    "permute": lambda c, x: c.permute(x, [(0, 0)]),
    "halo_exchange": lambda c, x: c.halo_exchange(x, 0, 1),
    "exchange_sizes": lambda c, x: c.exchange_sizes(1),
    "all": lambda c, x: c.all(True),
    "any": lambda c, x: c.any(True),
    "split": lambda c, x: c.split(0),
    "scatter_object": lambda c, x: c.scatter_object(["a"]),
    "duplicate": lambda c, x: c.duplicate(),
    "all_gather_": lambda c, x: c.all_gather_(GATHERED, x),
    "reduce_scatter_": lambda c, x: c.reduce_scatter_(SCATTERED, x),
}
BETWEEN_TWO = ("send", "recv")  # one process has nobody to send to


@pytest.mark.parametrize("name", [row.name for row in OPERATIONS if row.name not in BETWEEN_TWO])
def test_every_operation_breaks_the_graph_exactly_once(name):
    torch._dynamo.reset()
    with SingleProcessCollective().setup() as collective:
        call = CALLS.get(name, lambda c, x: getattr(c, name)(x))

        def around(x):
            x = x.sin()
            call(collective, x)
            return x.cos()

        explained = torch._dynamo.explain(around)(torch.ones(1, 2))
    assert explained.graph_count == 2, explained.break_reasons
    (reason,) = explained.break_reasons
    assert REASON in str(reason.reason)


def test_a_full_graph_is_refused_with_the_reason():
    torch._dynamo.reset()
    with SingleProcessCollective().setup() as collective:
        compiled = torch.compile(lambda x: collective.all_reduce(x.sin()), backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=REASON):
            compiled(torch.ones(2))


# torch.func and forward-mode derivatives


def test_a_jacobian_column_by_column_and_forward_over_reverse():
    def compare(collective):
        module = Layers(collective)
        x = input_of(collective).detach()
        tangent = torch.ones_like(x) / (collective.rank + 1)

        def gradient(x):
            return torch.func.grad(module)(x)

        _, forward = torch.func.jvp(gradient, (x,), (tangent,))
        y = input_of(collective)
        (first,) = torch.autograd.grad(module(y), y, create_graph=True)
        # The loss is symmetric in the two derivatives, summed over the ranks: sum of (H t) w = sum of (H w) t.
        weight = torch.full_like(x, 0.5 + collective.rank)
        (backward,) = torch.autograd.grad(first, y, weight)
        ours = collective.all_reduce((forward * weight).sum())
        theirs = collective.all_reduce((backward * tangent).sum())
        return close(ours, theirs)

    assert all(results(2, compare))


def test_vmap_over_a_collective_is_refused():
    with (
        SingleProcessCollective().setup() as collective,
        pytest.raises(NotImplementedError, match="Call the collective outside vmap"),
    ):
        torch.func.vmap(collective.all_reduce)(torch.ones(3, 2))
