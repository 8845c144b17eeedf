"""What torch_xla 2.9 gets wrong or lacks by itself, without a collective. Each is named in docs/xla.md; what no longer
fails can be taken out there."""

import pytest
import torch

from collective_strategy.collectives.host import host_copy
from collective_strategy.testing import WorkerDiedError, run_ranks


def alone(function):
    """On one device, without a collective."""
    return run_ranks(1, function, backend=None, ranks="device")[0].result()


def test_complex128_loses_its_imaginary_part_when_it_is_read():
    """The device has it: what is computed is right, and what `host_copy` brings."""

    def values(_):
        import torch_xla

        x = torch.tensor([1 + 2j], dtype=torch.complex128).to(torch_xla.device()) * (1 + 1j)
        return x.cpu().tolist(), torch.view_as_real(x).tolist(), host_copy(x).tolist()

    assert alone(values) == ([-1.0], [[-1.0, 3.0]], [-1 + 3j])


def test_a_complex_tensor_divided_by_a_number_calls_itself_real():
    """Its values are complex all the same. Our means divide pairs of numbers."""

    def values(_):
        import torch_xla

        x = torch.tensor([1 + 2j], dtype=torch.complex64).to(torch_xla.device())
        return (x / 2).dtype, (x * 0.5).dtype, torch.view_as_complex(torch.view_as_real(x) / 2).tolist()

    assert alone(values) == (torch.float32, torch.complex64, [0.5 + 1j])


def test_the_gradient_of_a_mean_of_complex_numbers_is_complex():
    def values(collective):
        gradients = []
        for mean in (collective.reduce, lambda x: collective.reduce_scatter(x, "mean")):
            x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).to(collective.device).requires_grad_()
            (mean(x) * (1 - 1j)).real.sum().backward()
            gradients.append((x.grad.dtype, x.grad.tolist()))
        return gradients

    # the derivative of Re((1 - i) x) is 1 + i; the mean's copies are summed, of the scattered mean each has a half
    both, half = [1 + 1j] * 2, [0.5 + 0.5j] * 2
    for outcome in run_ranks(2, values, backend="xla"):
        assert outcome.result() == [(torch.complex64, both), (torch.complex64, half)]


def test_torch_xlas_own_broadcast_lets_a_nan_of_another_rank_through():
    """What `test_xla.test_a_nan_stays_where_it_belongs` would see."""

    def value(_):
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model

        x = torch.tensor([7.0 if runtime.global_ordinal() == 1 else float("nan")]).to(torch_xla.device())
        torch_xla.sync()
        xla_model.collective_broadcast([x], root_ordinal=1, pin_layout=False)
        torch_xla.sync()
        return x.isnan().item()

    assert [outcome.result() for outcome in run_ranks(2, value, backend=None, ranks="device")] == [True, True]


@pytest.mark.extended
def test_without_a_cut_what_one_rank_has_pending_ends_all():
    """What `test_xla.test_what_one_rank_alone_has_pending_hangs_nobody` would see."""

    def value(_):
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model

        x = torch.ones(2).to(torch_xla.device())
        torch_xla.sync()
        pending = x.sin() if runtime.global_ordinal() == 0 else None
        total = xla_model.all_reduce("sum", x, pin_layout=False)
        torch_xla.sync()
        return total.tolist(), pending is None

    for outcome in run_ranks(2, value, backend=None, ranks="device", timeout=40, fresh=True):
        assert isinstance(outcome.error, WorkerDiedError)


def test_sparse_gradients_are_refused_by_torch():
    def backward(_):
        import torch_xla

        table = torch.nn.Embedding(4, 2, sparse=True).to(torch_xla.device())
        with pytest.raises(NotImplementedError, match="SparseXLA"):
            table(torch.tensor([0, 2]).to(torch_xla.device())).sum().backward()

    alone(backward)


def test_a_rank_gives_back_tensors_of_the_host():
    """What a rank returns is read in a process that has no XLA device."""

    def values(collective):
        x = torch.full((2,), float(collective.rank)).to(collective.device)
        weight = torch.nn.Parameter(x + 1)
        return {"x": [x], "weight": weight, "complex": torch.complex(x.double(), x.double())}

    for rank, outcome in enumerate(run_ranks(2, values, backend="xla")):
        result = outcome.result()
        assert torch.equal(result["x"][0], torch.full((2,), float(rank)))
        assert isinstance(result["weight"], torch.nn.Parameter)
        assert result["weight"].tolist() == [rank + 1.0] * 2
        assert result["complex"].tolist() == [rank + rank * 1j] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_activations_draws_the_same_dropout_again(reentrant):
    """torch asks a device's module for its random state; XLA's is registered with the collective."""

    def difference(collective):
        with torch.device(collective.device):
            layers = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(64, 1, bias=False))
            x = torch.ones(1, 64, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=reentrant)
        torch.rand(3, device=collective.device)
        y.backward()
        dropped = layers[1].weight.grad[0]  # what the linear layer saw when it ran again
        return (layers[1].weight[0] @ dropped - y).abs().item(), (dropped == 0).sum().item()

    for outcome in run_ranks(2, difference, backend="xla"):
        difference_found, zeros = outcome.result()
        assert difference_found < 1e-5
        assert 0 < zeros < 64
