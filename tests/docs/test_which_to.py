"""The table "Which `to`?" of the page on collectives, against one process on the joined batch."""

import pytest
import torch

from collective_strategy.testing import run_ranks

SAMPLES = torch.tensor([[0.3, -1.0], [1.2, 0.4], [-0.7, 0.9], [0.5, 1.5]], dtype=torch.float64)  # two per rank
WEIGHT = torch.tensor([[1.0, -0.5], [0.25, 2.0]], dtype=torch.float64)


def contrastive(own, everyone, first):
    """Each of ``own`` wants to be told from the others: a loss whose rows depend on all samples."""
    closeness = -(own.unsqueeze(1) - everyone).square().sum(dim=2)
    itself = torch.arange(first, first + len(own)).unsqueeze(1) == torch.arange(len(everyone))
    return closeness.masked_fill(itself, -torch.inf).logsumexp(dim=1).mean()


def gradient_in_one_process():
    weight = WEIGHT.clone().requires_grad_()
    points = SAMPLES @ weight
    contrastive(points, points, 0).backward()
    return weight.grad


def averaged_gradient(collective, to, of_own_samples):
    weight = WEIGHT.clone().requires_grad_()
    first = 2 * collective.rank
    points = SAMPLES[first : first + 2] @ weight
    everyone = collective.all_gather(points, dim=0, to=to)
    loss = contrastive(points, everyone, first) if of_own_samples else contrastive(everyone, everyone, 0)
    loss.backward()
    return collective.all_reduce(weight.grad, "mean")


@pytest.mark.parametrize(
    ("to", "of_own_samples", "factor"),
    [
        ("replicate", True, 1.0),
        ("replicate", False, 1.0),
        ("invariant", False, 0.5),  # too small, by the number of ranks
        ("invariant", True, None),  # wrong direction: no factor mends it
    ],
)
def test_the_gradient_of_a_loss_over_the_joined_batch(to, of_own_samples, factor):
    expected = gradient_in_one_process()
    for outcome in run_ranks(2, averaged_gradient, to, of_own_samples):
        gradient = outcome.result()
        if factor is None:
            cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0)
            assert abs(cosine) < 0.99
        else:
            torch.testing.assert_close(gradient, expected * factor)
