"""The contrastive loss over ranks is that of the joined batch, and the gather's gradient decides it."""

import pytest
from running import load, on_ranks, output_of_main

example = load("clip_loss")
LOSSES = [example.LocalRowsLoss, example.GlobalLoss]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_compares_itself_with_one_process(processes):
    output = output_of_main(example, processes)
    for loss in ("local rows", "global"):
        assert f"Contrastive loss, {loss}: {processes} ranks and one process" in output


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_averaged_gradients_are_those_of_one_process(ranks, loss):
    differences = on_ranks(ranks, example.differences, loss)
    assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize("loss", LOSSES)
def test_keeping_only_the_own_slice_of_the_gradient_is_wrong(loss):
    def own_slice(collective):
        all_gather = collective.all_gather
        collective.all_gather = lambda x, dim, to: all_gather(x, dim, to="invariant")
        return example.differences(collective, loss)

    differences = on_ranks(2, own_slice)
    assert differences["loss"] < 1e-12
    assert differences["gradients of the weights, averaged"] > 1e-2
