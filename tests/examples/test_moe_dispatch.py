"""Tokens that travel to their experts and back give what one process gives, whoever stays without tokens."""

import pytest
import torch
from running import load, on_ranks, output_of_main, without_gradient_sum

from collective_strategy.testing import run_ranks

example = load("moe_dispatch")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_compares_itself_with_one_process(processes):
    output = output_of_main(example, processes)
    assert f"Mixture of experts: {processes} ranks and one process" in output
    assert ("one without tokens" in output) == (processes > 1)


@pytest.mark.parametrize("lonely_expert", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])  # one rank of three has no token of its own either
def test_result_and_gradients_are_those_of_one_process(ranks, lonely_expert):
    differences = on_ranks(ranks, example.differences, 11, lonely_expert)
    assert max(differences.values()) < 1e-12, differences


def test_the_lonely_expert_gets_no_token_and_a_gradient_of_zero():
    def tokens_and_gradient(collective):
        torch.manual_seed(0)
        whole = example.MixtureOfExperts(2).double()
        torch.nn.init.constant_(whole.router.bias[-1:], -100.0)
        layer = example.ExpertParallel(whole, collective)
        seen = []
        layer.expert.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
        layer(torch.ones(3, example.FEATURES, dtype=torch.float64)).sum().backward()
        return seen, all(bool((parameter.grad == 0).all()) for parameter in layer.expert.parameters())

    outcomes = [outcome.result() for outcome in run_ranks(2, tokens_and_gradient)]
    assert outcomes == [([6], False), ([0], True)]


def test_the_router_needs_the_sum_of_all_tokens_gradients():
    def forgetful(collective):
        return example.differences(without_gradient_sum(collective), 11, False)

    differences = on_ranks(2, forgetful)
    assert differences["gradient of the input"] < 1e-12
    assert differences["gradients of the router, as they are"] > 1e-3


def test_tokens_that_travel_without_gradient_are_noticed():
    def one_way(collective):
        all_to_all = collective.all_to_all
        collective.all_to_all = lambda x, sizes: all_to_all(x.detach(), sizes=sizes).requires_grad_()
        layer = example.ExpertParallel(example.MixtureOfExperts(2), collective)
        layer(torch.ones(3, example.FEATURES)).sum().backward()
        return [parameter.grad for parameter in layer.expert.parameters()]

    assert on_ranks(2, one_way) == [None] * 4
