"""Collectives in real worlds of one, two and three processes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from parallelize import ConfigError, SyncError, distributed, rank
from parallelize.collectives import all_gather, all_reduce, barrier, broadcast, main_first


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    count: int


@pytest.fixture(scope="module", params=[2, 3])
def processes(request):
    return request.param


def test_reductions_of_tensors(processes):
    """Each operation equals torch's on the stacked values, and leaves its input unchanged."""

    @distributed(processes=processes)
    def run():
        x = torch.tensor([1.0, -2.0]) * (rank() + 1)
        before = x.clone()
        results = {op: all_reduce(x, op) for op in ("mean", "sum", "max", "min")}
        assert torch.equal(x, before)
        return results

    values = torch.stack([torch.tensor([1.0, -2.0]) * (each + 1) for each in range(processes)])
    for results in run.all_ranks():
        torch.testing.assert_close(results["mean"], values.mean(0))
        torch.testing.assert_close(results["sum"], values.sum(0))
        torch.testing.assert_close(results["max"], values.amax(0))
        torch.testing.assert_close(results["min"], values.amin(0))


def test_containers_and_numbers():
    """Containers keep their types; the mean of ints is a float, their sum an int, and the max of bools a bool."""

    @distributed(processes=2)
    def run():
        x = OrderedDict(
            pair=Pair(rank(), [float(rank())]), result=Result(torch.tensor(rank()), rank()), flag=rank() == 1
        )
        return all_reduce(x, "sum"), all_reduce(x, "max"), all_reduce(rank(), "mean"), all_gather(x)

    for summed, largest, mean, gathered in run.all_ranks():
        assert summed == OrderedDict(pair=Pair(1, [1.0]), result=Result(torch.tensor(1), 1), flag=1)
        assert isinstance(summed, OrderedDict)
        assert isinstance(summed["pair"].first, int)
        assert largest["flag"] is True
        assert mean == 0.5
        assert gathered["pair"] == Pair([0, 1], [[0.0, 1.0]])
        assert gathered["result"].loss.tolist() == [0, 1]


def test_types_are_kept():
    """Results have the dtype of the input, for every shape, also empty or not contiguous."""
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]

    @distributed(processes=2)
    def run():
        shapes = [torch.zeros(()), torch.zeros(0, 3), torch.zeros(4, 3).T]
        inputs = [(each + rank()).to(dtype) for dtype in dtypes for each in shapes]
        return [(x, all_reduce(x, "max"), all_gather(x), broadcast(x, src=1)) for x in inputs]

    for x, largest, gathered, sent in run():
        assert largest.dtype == gathered.dtype == sent.dtype == x.dtype
        assert largest.shape == sent.shape == x.shape
        assert gathered.shape == (2, *x.shape)
        assert torch.equal(largest, torch.ones_like(x))
        assert torch.equal(sent, torch.ones_like(x))


# Dtypes of 1 to 8 bytes that no process group supports: they are sent as other dtypes or as bytes.
RARE = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def test_dtypes_that_no_process_group_supports():
    """Gathered and broadcast values are equal bit by bit, for every shape, also empty or not contiguous."""

    @distributed(processes=2)
    def run():
        shapes = [torch.zeros(()), torch.zeros(0, 3), torch.arange(6.0).view(2, 3).T]
        inputs = [(each + rank()).to(dtype) for each in shapes for dtype in RARE]
        return [(x, all_gather(x), broadcast(x, src=1)) for x in inputs]

    for inputs in zip(*run.all_ranks(), strict=True):
        mine = [x.tolist() for x, _, _ in inputs]
        for x, gathered, sent in inputs:
            assert gathered.dtype == sent.dtype == x.dtype
            assert gathered.tolist() == mine
            assert sent.tolist() == mine[1]


def test_small_integers_are_reduced_in_their_own_type():
    """Sums and extrema of 16 and 32 bits keep their dtype; a sum wraps around as in torch."""

    @distributed(processes=2)
    def run():
        xs = [torch.tensor([7, 2**15 - 1], dtype=dtype) for dtype in (torch.int16, torch.uint16, torch.uint32)]
        return [(all_reduce(x, "sum"), all_reduce(x - rank(), "min")) for x in xs[:1]], all_reduce(xs[1:], "sum")

    [(summed, least)], unsigned = run()
    assert summed.dtype == least.dtype == torch.int16
    assert (summed.tolist(), least.tolist()) == ([14, -2], [6, 2**15 - 2])
    assert [each.dtype for each in unsigned] == [torch.uint16, torch.uint32]
    assert [each.tolist() for each in unsigned] == [[14, 2**16 - 2]] * 2


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_is_never_lost(op, processes):
    """A nan of any process makes the result nan, in tensors of every floating dtype and in numbers."""

    @distributed(processes=processes)
    def run():
        # Process i holds a nan in element i only, and numbers below and above those of the others.
        x = torch.full((processes + 1,), float(rank()))
        x[rank()] = torch.nan
        tensors = [all_reduce(x.to(dtype), op) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
        return tensors, [all_reduce(each, op) for each in x.tolist()]

    kept = float(processes - 1 if op == "max" else 0)
    expected = torch.tensor([torch.nan] * processes + [kept])
    for tensors, numbers in run.all_ranks():
        for each in (*tensors, torch.tensor(numbers)):
            torch.testing.assert_close(each, expected.to(each.dtype), equal_nan=True, rtol=0, atol=0)


def test_means_of_half_precision_do_not_overflow(processes):
    """Means of large fp16 values do not overflow to inf, in forward and in backward."""

    @distributed(processes=processes)
    def run():
        x = torch.tensor([40000.0, 1.0], dtype=torch.float16, requires_grad=True)
        mean = all_reduce(x, "mean")
        mean.backward(torch.tensor([30000.0, 1.0], dtype=torch.float16))
        return mean.detach(), x.grad

    for mean, grad in run.all_ranks():
        assert mean.dtype == grad.dtype == torch.float16
        assert mean.tolist() == [40000.0, 1.0]
        assert grad.tolist() == [30000.0, 1.0]


def test_lazy_conjugates_and_negations():
    """The lazy views x.conj() and x.conj().imag are sent with their values, and gradients flow back."""

    @distributed(processes=2)
    def run():
        x = torch.tensor([1 + 2j, 3 - 1j]) * (rank() + 1)
        leaf = x.clone().requires_grad_()
        summed = all_reduce(leaf.conj(), "sum")
        summed.conj().imag.sum().backward()
        found = all_gather(x.conj()), broadcast(x.conj().imag, src=1), summed.detach()
        return [each.resolve_neg().resolve_conj() for each in found], leaf.grad.resolve_conj()

    for (gathered, sent, summed), grad in run.all_ranks():
        assert gathered.tolist() == [[1 - 2j, 3 + 1j], [2 - 4j, 6 + 2j]]
        assert sent.tolist() == [-4.0, 2.0]
        assert summed.tolist() == [3 - 6j, 9 + 3j]
        assert grad.tolist() == [2j, 2j]


def test_sums_of_integers_outgrow_64_bits():
    """Python integers are summed without overflow."""

    @distributed(processes=2)
    def run():
        return all_reduce(2**63 - 1 - rank(), "sum"), all_reduce(2**63 - 1 - rank(), "min")

    assert run() == (2**64 - 3, 2**63 - 2)


def test_gradients_cross_processes(processes):
    """Gradients of the sum of all ranks' losses equal those of a single process."""

    def inputs():
        return [(torch.tensor([1.0, -2.0]) * (each + 1)).requires_grad_() for each in range(processes)]

    def loss(weight, reduced, gathered, sent):
        reductions = reduced["mean"] ** 2 + reduced["sum"] + reduced["max"] * 2 + reduced["min"]
        return (torch.tensor([1.0, 3.0]) * weight * (reductions + (gathered**2).sum(0) + sent)).sum()

    @distributed(processes=processes)
    def run():
        x = inputs()[rank()]
        reduced = {op: all_reduce(x, op) for op in ("mean", "sum", "max", "min")}
        loss(rank() + 1, reduced, all_gather(x), broadcast(x, src=1)).backward()
        return x.grad

    xs = inputs()
    stacked = torch.stack(xs)
    reduced = {"mean": stacked.mean(0), "sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}
    sum(loss(each + 1, reduced, stacked, xs[1]) for each in range(processes)).backward()
    for grad, x in zip(run.all_ranks(), xs, strict=True):
        torch.testing.assert_close(grad, x.grad)


def test_a_world_of_one_changes_nothing():
    """With one process each collective returns the value as a new, differentiable tensor."""
    x = torch.tensor([2.0], requires_grad=True)
    for y in (all_reduce(x, "mean"), all_gather(x)[0], broadcast(x)):
        assert torch.equal(y, x)
        y.sum().backward()
        y.data.add_(1)
    assert x.tolist() == [2.0]
    assert x.grad.tolist() == [3.0]
    assert (all_reduce(3, "mean"), all_reduce(3, "sum"), all_gather(True), broadcast(2.5)) == (3.0, 3, [True], 2.5)
    barrier("alone")
    with main_first():
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_reduce(1.0, "avg"), "op='avg'"),
        (lambda: all_reduce("text", "mean"), "of str 'text'"),
        (lambda: all_reduce(torch.tensor(1), "mean"), "a tensor of torch.int64"),
        (lambda: all_reduce(torch.tensor(True), "sum"), "a tensor of torch.bool"),
        (lambda: all_reduce([torch.eye(2).to_sparse()], "mean"), "torch.sparse_coo"),
        (lambda: all_reduce(torch.zeros(1, dtype=torch.uint64), "max"), "a tensor of torch.uint64"),
        (lambda: all_reduce(torch.zeros(1).to(torch.float8_e5m2), "mean"), "a tensor of torch.float8_e5m2"),
        (lambda: all_gather(torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)), "torch.jagged"),
        (lambda: all_gather(2**70), "an integer of 71 bits"),
        (lambda: all_reduce(-(2**63) - 1, "mean"), "an integer of 64 bits"),
        (lambda: broadcast(1, src=1), "src=1"),
        (lambda: broadcast(1, src=True), "src=True"),
        (lambda: all_gather({"a": None}), "of NoneType None"),
    ],
)
def test_unsupported_values_are_refused(call, message):
    """The error has the value, the reason and the fix."""
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert caught.value.faults[0].why
    assert caught.value.faults[0].fix


@pytest.mark.parametrize("case", ["shape", "type", "keys", "operation", "collective", "barrier", "source", "gradient"])
def test_different_calls_raise_on_all_ranks(case):
    """If ranks make different calls, all of them raise an error with every call instead of hanging."""

    def different_call():
        return {
            "shape": lambda: all_reduce(torch.zeros(3 + rank()), "mean"),
            "type": lambda: all_gather(1 if rank() else 1.0),
            "keys": lambda: all_reduce({f"loss{rank()}": 1.0}, "mean"),
            "operation": lambda: all_reduce(1.0, "max" if rank() else "min"),
            "collective": lambda: all_reduce(1.0, "mean") if rank() else barrier(),
            "barrier": lambda: barrier(f"stage {rank()}"),
            "source": lambda: broadcast(1.0, src=rank()),
            "gradient": lambda: all_reduce(torch.zeros(1, requires_grad=rank() == 0), "mean"),
        }[case]()

    @distributed(processes=2, timeout=120)
    def run():
        with pytest.raises(SyncError, match=r"rank 0 is at .*; rank 1 is at ") as caught:
            different_call()
        return str(caught.value)

    texts = run.all_ranks()
    assert texts[0] == texts[1]


def test_the_main_process_goes_first(tmp_path):
    """Rank 0 has left the block before the others enter it."""

    @distributed(processes=3)
    def run():
        with main_first():
            found = (tmp_path / "prepared").exists()
            (tmp_path / "prepared").touch()
        return found

    assert run.all_ranks() == [False, True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_main_first_reaches_all(failing):
    """The failing rank raises its own error, and every other rank a SyncError that quotes it."""

    @distributed(processes=2, timeout=120)
    def run():
        try:
            with main_first():
                if rank() == failing:
                    raise OSError("disk full")
        except OSError as exc:
            return str(exc)
        except SyncError as exc:
            return str(exc)
        return "no error"

    texts = run.all_ranks()
    assert texts[failing] == "disk full"
    assert f"main_first failed on rank {failing}: OSError: disk full" in texts[1 - failing]


def test_a_launched_process_without_a_group_is_refused(run_script):
    """With torchrun's variables, but no process group, a collective raises ConfigError."""
    script = """
        from parallelize.collectives import barrier
        from parallelize import ConfigError
        try:
            barrier()
        except ConfigError as exc:
            print(exc)
    """
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    assert "no process group in a world of 2" in run_script(script, env=variables).stdout
