"""What processes tell each other, in real worlds of two and three and in a world of one."""

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
    """Each operation gives what it gives on one tensor of all values, and leaves the input alone."""

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
    """Containers keep their types; a mean of ints is a float, their sum an int, of bools max is "any"."""

    @distributed(processes=2)
    def run():
        x = OrderedDict(
            pair=Pair(rank(), [float(rank())]), result=Result(torch.tensor(rank()), rank()), flag=rank() == 1
        )
        return all_reduce(x, "sum"), all_reduce(x, "max"), all_reduce(rank()), all_gather(x)

    for summed, largest, mean, gathered in run.all_ranks():
        assert summed == OrderedDict(pair=Pair(1, [1.0]), result=Result(torch.tensor(1), 1), flag=1)
        assert isinstance(summed, OrderedDict)
        assert isinstance(summed["pair"].first, int)
        assert largest["flag"] is True
        assert mean == 0.5
        assert gathered["pair"] == Pair([0, 1], [[0.0, 1.0]])
        assert gathered["result"].loss.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool])
def test_types_are_kept(dtype):
    """What comes back has the type that went in, in every shape, also of no elements and not contiguous."""

    @distributed(processes=2)
    def run():
        shapes = [torch.zeros(()), torch.zeros(0, 3), torch.zeros(4, 3).T]
        inputs = [(each + rank()).to(dtype) for each in shapes]
        return [(x, all_reduce(x, "max"), all_gather(x), broadcast(x, src=1)) for x in inputs]

    for x, largest, gathered, sent in run():
        assert largest.dtype == gathered.dtype == sent.dtype == dtype
        assert largest.shape == sent.shape == x.shape
        assert gathered.shape == (2, *x.shape)
        assert torch.equal(largest, torch.ones_like(x))
        assert torch.equal(sent, torch.ones_like(x))


# Of one byte to eight: no process group knows them, so they travel in other types or as bytes.
RARE = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def test_types_that_no_process_group_knows_travel_too():
    """What is gathered or sent comes back bit by bit, in every shape, also of no elements and not contiguous."""

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
    """Sums and extrema of 16 and 32 bits come back in the type that went in; a sum wraps around as in torch."""

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
    """Whichever process holds it: in tensors of every floating type, and as a number."""

    @distributed(processes=processes)
    def run():
        # Process i holds a nan in element i only, and numbers on both sides of the others'.
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
    """The mean of large fp16 values is one of them, not inf, and so is the mean that backward takes of gradients."""

    @distributed(processes=processes)
    def run():
        x = torch.tensor([40000.0, 1.0], dtype=torch.float16, requires_grad=True)
        mean = all_reduce(x)
        mean.backward(torch.tensor([30000.0, 1.0], dtype=torch.float16))
        return mean.detach(), x.grad

    for mean, grad in run.all_ranks():
        assert mean.dtype == grad.dtype == torch.float16
        assert mean.tolist() == [40000.0, 1.0]
        assert grad.tolist() == [30000.0, 1.0]


def test_pending_conjugates_and_negations_travel():
    """x.conj() and x.conj().imag are views that torch has not computed yet; their values arrive, gradients return."""

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
    """Python's integers have no end, and neither has their sum."""

    @distributed(processes=2)
    def run():
        return all_reduce(2**63 - 1 - rank(), "sum"), all_reduce(2**63 - 1 - rank(), "min")

    assert run() == (2**64 - 3, 2**63 - 2)


def test_gradients_cross_processes(processes):
    """The gradient of the sum of all ranks' losses is the one that a single process computes."""

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
    """Without other processes each is the value itself, as a new tensor that gradients pass through."""
    x = torch.tensor([2.0], requires_grad=True)
    for y in (all_reduce(x), all_gather(x)[0], broadcast(x)):
        assert torch.equal(y, x)
        y.sum().backward()
        y.data.add_(1)
    assert x.tolist() == [2.0]
    assert x.grad.tolist() == [3.0]
    assert (all_reduce(3), all_reduce(3, "sum"), all_gather(True), broadcast(2.5)) == (3.0, 3, [True], 2.5)
    barrier("alone")
    with main_first():
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_reduce(1.0, "avg"), "op='avg'"),
        (lambda: all_reduce("text"), "of str 'text'"),
        (lambda: all_reduce(torch.tensor(1)), "a tensor of torch.int64"),
        (lambda: all_reduce(torch.tensor(True), "sum"), "a tensor of torch.bool"),
        (lambda: all_reduce([torch.eye(2).to_sparse()]), "torch.sparse_coo tensor"),
        (lambda: all_reduce(torch.zeros(1, dtype=torch.uint64), "max"), "a tensor of torch.uint64"),
        (lambda: all_reduce(torch.zeros(1).to(torch.float8_e5m2)), "a tensor of torch.float8_e5m2"),
        (lambda: all_gather(torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)), "a nested tensor"),
        (lambda: all_gather(2**70), "an integer of 71 bits"),
        (lambda: all_reduce(-(2**63) - 1), "an integer of 64 bits"),
        (lambda: broadcast(1, src=1), "src=1"),
        (lambda: broadcast(1, src=True), "src=True"),
        (lambda: all_gather({"a": None}), "of NoneType None"),
    ],
)
def test_what_cannot_travel_is_refused(call, message):
    """The error names the value, and says why and what to do."""
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert caught.value.faults[0].why
    assert caught.value.faults[0].fix


@pytest.mark.parametrize("case", ["shape", "type", "keys", "operation", "collective", "barrier", "source", "gradient"])
def test_processes_that_differ_are_told(case):
    """A call that is not alike on all ranks ends on all of them with an error that quotes each, instead of hanging."""

    def other():
        return {
            "shape": lambda: all_reduce(torch.zeros(3 + rank())),
            "type": lambda: all_gather(1 if rank() else 1.0),
            "keys": lambda: all_reduce({f"loss{rank()}": 1.0}),
            "operation": lambda: all_reduce(1.0, "max" if rank() else "min"),
            "collective": lambda: all_reduce(1.0) if rank() else barrier(),
            "barrier": lambda: barrier(f"stage {rank()}"),
            "source": lambda: broadcast(1.0, src=rank()),
            "gradient": lambda: all_reduce(torch.zeros(1, requires_grad=rank() == 0)),
        }[case]()

    @distributed(processes=2, timeout=20)
    def run():
        with pytest.raises(SyncError, match=r"rank 0 is at .*; rank 1 is at ") as caught:
            other()
        return str(caught.value)

    texts = run.all_ranks()
    assert texts[0] == texts[1]


def test_the_main_process_goes_first(tmp_path):
    """What rank 0 prepares in the block is there when the others enter it."""

    @distributed(processes=3)
    def run():
        with main_first():
            found = (tmp_path / "prepared").exists()
            (tmp_path / "prepared").touch()
        return found

    assert run.all_ranks() == [False, True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_main_first_reaches_all(failing):
    """The failing rank raises its own error, every other one an error that names it."""

    @distributed(processes=2, timeout=20)
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


def test_a_launched_process_without_a_group_is_told(run_script):
    """Under torchrun's variables, but before anybody has made a process group, a collective is refused."""
    script = """
        from parallelize.collectives import barrier
        from parallelize import ConfigError
        try:
            barrier()
        except ConfigError as exc:
            print(exc)
    """
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    assert "no process group in a world of 2" in run_script(script, env=variables).stdout
