"""Convolutions over split rows are one process' convolutions, with uneven pieces and both kinds of borders."""

import pytest
import torch
from running import load, on_ranks, output_of_main, without_gradient_sum
from torch import nn

from collective_strategy.collectives import SingleProcessCollective

example = load("domain_parallel_convolution")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_compares_itself_with_one_process(processes):
    output = output_of_main(example, processes)
    for border in ("zeros", "circular"):
        assert f"Convolutions, {border} at the borders: {processes} ranks and one process" in output


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
@pytest.mark.parametrize("ranks", [2, 3])  # 4 and 9 rows, or 4, 2 and 7
def test_result_and_gradients_are_those_of_one_process(ranks, padding_mode):
    differences = on_ranks(ranks, example.differences, padding_mode)
    assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_padding_every_piece_by_itself_is_noticed(padding_mode):
    def alone(collective):
        def with_zeros(x, dim, width, wrap):
            return torch.nn.functional.pad(x, (0, 0, width, width))

        collective.halo_exchange = with_zeros
        return example.differences(collective, padding_mode)

    differences = on_ranks(2, alone)
    assert min(differences.values()) > 1e-3, differences


def test_borders_that_travel_without_gradient_are_noticed():
    def one_way(collective):
        halo_exchange = collective.halo_exchange

        def without_the_neighbours_gradients(x, dim, width, wrap):
            borders = halo_exchange(x.detach(), dim, width, wrap=wrap)
            before, after = borders.narrow(dim, 0, width), borders.narrow(dim, -width, width)
            return torch.cat([before, x, after], dim)

        collective.halo_exchange = without_the_neighbours_gradients
        return example.differences(collective, "zeros")

    differences = on_ranks(2, one_way)
    assert differences["result"] < 1e-12
    assert differences["gradient of the input"] > 1e-3


def test_weights_need_the_sum_of_all_rows_gradients():
    differences = on_ranks(2, lambda collective: example.differences(without_gradient_sum(collective), "zeros"))
    assert differences["gradient of the input"] < 1e-12
    assert differences["gradients of the weights, as they are"] > 1e-2


def test_other_paddings_are_refused():
    with SingleProcessCollective().setup() as alone, pytest.raises(ValueError, match="padding must be 'same'"):
        example.DomainParallelConv2d(nn.Conv2d(1, 1, 3, padding="same", padding_mode="reflect"), alone)
