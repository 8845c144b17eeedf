"""Uses that nobody planned: threads, nested modes, odd colors, hostile containers, indexing where there is nothing."""

import os
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from collective_strategy.collectives import Collective, TorchDistributedCollective
from collective_strategy.testing import run_ranks


def results(n: int, function: Any, **options: Any) -> list[Any]:
    return [outcome.result() for outcome in run_ranks(n, function, **{"timeout": 20, **options})]


def error_of(call: Any) -> tuple[str, str]:
    try:
        return "nothing raised", repr(call())
    except Exception as error:
        return type(error).__name__, str(error)


def test_another_thread_may_communicate_while_the_main_thread_does_not() -> None:
    def in_thread(c: Collective) -> int:
        found: list[int] = []
        for _ in range(3):
            thread = threading.Thread(target=lambda: found.append(c.all_reduce(1).item()))
            thread.start()
            thread.join()
            found.append(c.all_reduce(2).item())
        return sum(found)

    assert results(2, in_thread) == [18, 18]


def test_two_threads_use_two_groups() -> None:
    def two(c: Collective) -> list[int]:
        groups = [c.split(0), c.split(1)]
        found = [0, 0]

        def work(index: int) -> None:
            for _ in range(30):
                found[index] += groups[index].all_reduce(1 + index).item()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    # In check mode one connection to the store serves all threads, and a waiting one holds it.
    assert results(2, two, check=False) == [[60, 120]] * 2


def test_a_backward_in_another_thread_communicates() -> None:
    def backward(c: Collective) -> float:
        x = torch.ones(1, requires_grad=True)
        loss = c.all_gather(x).sum() * (1 + c.rank)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert x.grad is not None
        return x.grad.item()

    assert results(2, backward) == [3.0, 3.0]


class Grumpy:
    """A registered container that fails to be taken apart with an error of its own."""


def _refuse(value: Grumpy) -> Any:
    raise KeyError("not today")


def test_a_container_that_fails_on_one_rank_is_heard_of_by_all() -> None:
    def one_fails(c: Collective) -> tuple[tuple[str, str], int]:
        if Grumpy not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(Grumpy, _refuse, lambda parts, context: Grumpy())
        value = Grumpy() if c.rank == 1 else torch.ones(1)
        return error_of(lambda: c.all_gather(value)), c.all_reduce(1).item()

    (first, after), (second, _) = results(2, one_fails, check=True, fresh=True)
    assert second == ("KeyError", "'not today'")
    assert first[0] == "CollectiveMismatchError"
    assert "rank 1 refused all_gather" in first[1]
    assert after == 2


def test_colors_that_cannot_be_compared_are_refused_on_all_ranks() -> None:
    def split(c: Collective) -> tuple[tuple[str, str], int]:
        color: Any = [c.rank] if c.rank == 0 else c.rank
        return error_of(lambda: c.split(color)), c.all_reduce(1).item()

    first, second = results(2, split)
    for (kind, text), after in (first, second):
        assert kind in ("TypeError", "CollectiveMismatchError")
        assert "color" in text
        assert after == 2


def test_a_color_that_equals_nothing_makes_a_group_of_one() -> None:
    assert results(2, lambda c: c.split(float("nan")).world_size) == [1, 1]


def test_a_part_has_no_axes_and_says_so() -> None:
    def index(c: Collective) -> list[tuple[str, str]]:
        inside = c["model"]
        outside = c.split(None if c.rank == 0 else "in")
        return [error_of(lambda: inside["data"]), error_of(lambda: outside["data"])]

    for errors in results(4, index, mesh={"data": 2, "model": 2}):
        for kind, text in errors:
            assert kind == "KeyError"
            assert "data" in text
            assert "neither an axis of the mesh {'data': 2" not in text


def test_a_union_of_all_axes_and_the_axes_of_size_one() -> None:
    def groups(c: Collective) -> tuple[list[int], int, int]:
        everyone = c["all"].all_gather_object(c.rank)
        return everyone, c["model"].all_reduce(5).item(), c["model"].broadcast(c.rank).item()

    mesh, unions = {"data": -1, "model": 1}, {"all": ("data", "model")}
    assert results(2, groups, mesh=mesh, unions=unions) == [([0, 1], 5, 0), ([0, 1], 5, 1)]


def test_without_a_data_axis_each_rank_is_its_own_data_group() -> None:
    def alone(c: Collective) -> tuple[int, int, float | None]:
        data = c.data
        x = torch.ones(1, requires_grad=True)
        data.all_reduce(x).sum().backward()
        return data.world_size, data.all_reduce(c.rank).item(), None if x.grad is None else x.grad.item()

    assert results(2, alone, mesh={"model": 2}, data_axis=None) == [(1, 0, 1.0), (1, 1, 1.0)]


def test_the_variable_decides_over_the_argument_whether_calls_are_compared() -> None:
    def differ(c: Collective) -> str:
        return error_of(lambda: c.barrier("a" if c.rank else "b"))[0]

    on = run_ranks(2, differ, check=False, fresh=True, env={"COLLECTIVE_STRATEGY_CHECK": "1"}, timeout=10)
    assert [outcome.result() for outcome in on] == ["CollectiveMismatchError"] * 2
    off = run_ranks(2, differ, check=True, fresh=True, env={"COLLECTIVE_STRATEGY_CHECK": "0"}, timeout=10)
    assert [outcome.result() for outcome in off] == ["nothing raised"] * 2


def test_a_nonsense_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVE_STRATEGY_CHECK", "maybe")
    with pytest.raises(ValueError, match=r"COLLECTIVE_STRATEGY_CHECK='maybe'"):
        TorchDistributedCollective()


@pytest.mark.parametrize("settings", [{"timeout": 0}, {"timeout": -1}, {"check": "yes"}, {"backend": 3}])
def test_wrong_settings_are_refused_at_construction(settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        TorchDistributedCollective(**settings)


def test_thousands_of_calls_leave_nothing_in_the_store() -> None:
    def many(c: Collective) -> tuple[int, int]:
        x = torch.ones(1)
        for _ in range(50):
            c.all_reduce(x)
        before = torch.distributed.distributed_c10d._get_default_store().num_keys()
        for _ in range(300):
            c.all_reduce(x)
        c.barrier()
        return before, torch.distributed.distributed_c10d._get_default_store().num_keys()

    for before, after in results(2, many):
        assert after - before < 10


def test_mismatches_leave_nothing_in_the_store() -> None:
    def many(c: Collective) -> int:
        store = torch.distributed.distributed_c10d._get_default_store()
        before = store.num_keys()
        for _ in range(20):
            error_of(lambda: c.all_reduce(torch.ones(1 + c.rank)))
        c.barrier()
        return store.num_keys() - before

    for added in results(2, many):
        assert added < 10


def test_a_mismatch_is_told_to_all_even_if_the_process_that_serves_the_store_ends_on_it() -> None:
    def mismatch(c: Collective) -> tuple[str, str]:
        time.sleep(0.1 * (c.rank == 1))
        error = error_of(lambda: c.all_reduce(torch.ones(1 + c.rank)))
        if c.rank == 0:
            os._exit(1)
        return error

    for _ in range(3):
        outcomes = run_ranks(3, mismatch, fresh=True, timeout=20)
        assert [outcome.result()[0] for outcome in outcomes[1:]] == ["CollectiveMismatchError"] * 2


def test_a_process_group_of_the_user_is_adopted_and_left_alone() -> None:
    def adopt(_: None) -> list[Any]:
        import torch.distributed as dist

        from collective_strategy import init

        dist.init_process_group("gloo")
        found: list[Any] = []
        extra = dist.new_group([0, 1])
        for _attempt in range(2):
            with init(mesh={"data": 1, "model": 2}, timeout=20) as c:
                found += [c.all_reduce(1).item(), c["model"].all_gather_object(c.rank), c.split(0).all_reduce(1).item()]
        x = torch.ones(1)
        dist.all_reduce(x, group=extra)
        found.append(x.item())
        dist.destroy_process_group()
        return found

    assert results(2, adopt, backend=None, fresh=True) == [[2, [0, 1], 2, 2, [0, 1], 2, 2.0]] * 2


def test_a_slow_rank_is_waited_for() -> None:
    def slow(c: Collective) -> list[float]:
        found = []
        for late in range(c.world_size):
            if c.rank == late:
                time.sleep(0.5)
            found.append(c.all_reduce(torch.ones(1)).item())
        return found

    assert results(2, slow, timeout=10) == [[2.0, 2.0]] * 2


def test_tensors_larger_than_a_message_of_gloo() -> None:
    def large(c: Collective) -> tuple[float, float]:
        x = torch.full((3_000_001,), float(c.rank + 1))
        return c.all_reduce(x).sum().item(), c.all_gather(x)[1, -1].item()

    assert results(2, large) == [(9_000_003.0, 2.0)] * 2


def test_a_deep_container_with_many_tensors() -> None:
    def deep(c: Collective) -> tuple[int, float]:
        value: Any = torch.ones(1)
        for _ in range(60):
            value = {"next": [value]}
        wide = [torch.full((1,), float(k)) for k in range(200)]
        result = c.all_reduce({"deep": value, "wide": wide})
        depth, node = 0, result["deep"]
        while isinstance(node, dict):
            node, depth = node["next"][0], depth + 1
        return depth, node.item() + sum(x.item() for x in result["wide"])

    assert results(2, deep) == [(60, 2 + 2 * sum(range(200)))] * 2


def test_results_of_one_call_do_not_keep_the_process_id_of_another() -> None:
    assert len({outcome.result() for outcome in run_ranks(2, lambda c: c.all_gather_object(os.getpid())[c.rank])}) == 2
