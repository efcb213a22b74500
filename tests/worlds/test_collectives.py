"""Collectives in real worlds of one and three processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from ranks import Checks

from parallelize import ConfigError, SyncError, distributed, rank, world_size
from parallelize.collectives import all_gather, all_reduce, barrier, broadcast, main_first


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    count: int


check = Checks(processes=3)


def of_all_ranks(value_of: Callable[[int], Any]) -> list[Any]:
    """Return what each rank has, computed from its number."""
    return [value_of(number) for number in range(world_size())]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@check
def reductions_of_tensors() -> None:
    """Each operation equals torch's on the stacked values, and leaves its input unchanged."""
    values = torch.stack(of_all_ranks(lambda number: torch.tensor([1.0, -2.0]) * (number + 1)))
    x = values[rank()].clone()
    expected = {"mean": values.mean(0), "sum": values.sum(0), "max": values.amax(0), "min": values.amin(0)}
    torch.testing.assert_close({op: all_reduce(x, op) for op in expected}, expected)
    assert torch.equal(x, values[rank()])


@check
def containers_and_numbers() -> None:
    """Containers keep their types; the mean of ints is a float, their sum an int, and the max of bools a bool."""
    numbers = of_all_ranks(int)
    x = OrderedDict(pair=Pair(rank(), [float(rank())]), result=Result(torch.tensor(rank()), rank()), flag=rank() == 1)
    summed, total = all_reduce(x, "sum"), sum(numbers)
    assert summed == OrderedDict(pair=Pair(total, [float(total)]), result=Result(torch.tensor(total), total), flag=1)
    assert isinstance(summed, OrderedDict)
    assert isinstance(summed["pair"].first, int)
    assert all_reduce(x, "max")["flag"] is True
    assert all_reduce(rank(), "mean") == total / len(numbers)
    gathered = all_gather(x)
    assert gathered["pair"] == Pair(numbers, [[float(each) for each in numbers]])
    assert gathered["result"].loss.tolist() == numbers


SHAPES = [torch.zeros(()), torch.zeros(0, 3), torch.zeros(4, 3).T]


@check
def types_are_kept() -> None:
    """Results have the dtype of the input, for every shape, also empty or not contiguous."""
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool):
        for shape in SHAPES:
            x = (shape + rank()).to(dtype)
            assert_same(all_reduce(x, "max"), (shape + world_size() - 1).to(dtype))
            assert_same(all_gather(x), torch.stack(of_all_ranks(lambda n, of=shape, to=dtype: (of + n).to(to))))
            assert_same(broadcast(x, src=1), (shape + 1).to(dtype))


@check
def dtypes_that_no_process_group_supports() -> None:
    """They are sent as other dtypes or as bytes: gathered and broadcast values are equal bit by bit."""
    shapes = [torch.zeros(()), torch.zeros(0, 3), torch.arange(6.0).view(2, 3).T]
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
        for shape in shapes:
            gathered, sent = all_gather((shape + rank()).to(dtype)), broadcast((shape + rank()).to(dtype), src=1)
            assert gathered.dtype == sent.dtype == dtype
            expected = of_all_ranks(lambda number, of=shape, to=dtype: (of + number).to(to).tolist())
            assert (gathered.tolist(), sent.tolist()) == (expected, expected[1])


@check
def small_integers_are_reduced_in_their_own_type() -> None:
    """Sums and extrema of 16 and 32 bits keep their dtype; a sum wraps around as in torch."""
    for dtype in (torch.int16, torch.uint16, torch.uint32):
        x = torch.tensor([7, 2**15 - 1], dtype=dtype)
        wrapped = torch.tensor([7 * world_size(), (2**15 - 1) * world_size()]).to(dtype)
        assert_same(all_reduce(x, "sum").to(torch.int64), wrapped.to(torch.int64))
        assert all_reduce(x, "sum").dtype == dtype
    assert_same(all_reduce(torch.tensor([7 - rank()], dtype=torch.int16), "min").tolist(), [8 - world_size()])


@check
def nan_is_never_lost() -> None:
    """A nan of any process makes the result nan, in tensors of every floating dtype and in numbers."""
    # Process i holds a nan in element i only, and numbers below and above those of the others.
    x = torch.full((world_size() + 1,), float(rank()))
    x[rank()] = torch.nan
    for op, kept in (("max", world_size() - 1.0), ("min", 0.0)):
        expected = torch.tensor([torch.nan] * world_size() + [kept])
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert_same(all_reduce(x.to(dtype), op), expected.to(dtype))
        assert_same(torch.tensor([all_reduce(each, op) for each in x.tolist()]), expected)


@check
def means_of_half_precision_do_not_overflow() -> None:
    """Means of large fp16 values do not overflow to inf, in forward and in backward."""
    x = torch.tensor([40000.0, 1.0], dtype=torch.float16, requires_grad=True)
    mean = all_reduce(x, "mean")
    mean.backward(torch.tensor([30000.0, 1.0], dtype=torch.float16))
    assert_same(mean.detach(), torch.tensor([40000.0, 1.0], dtype=torch.float16))
    assert_same(x.grad, torch.tensor([30000.0, 1.0], dtype=torch.float16))


@check
def lazy_conjugates_and_negations() -> None:
    """The lazy views x.conj() and x.conj().imag are sent with their values, and gradients flow back."""
    xs = of_all_ranks(lambda number: torch.tensor([1 + 2j, 3 - 1j]) * (number + 1))
    x, leaf = xs[rank()], xs[rank()].clone().requires_grad_()
    summed = all_reduce(leaf.conj(), "sum")
    summed.conj().imag.sum().backward()
    assert summed.tolist() == sum(each.conj() for each in xs).tolist()
    assert all_gather(x.conj()).tolist() == [each.conj().tolist() for each in xs]
    assert broadcast(x.conj().imag, src=1).tolist() == [-4.0, 2.0]
    assert leaf.grad.resolve_conj().tolist() == [world_size() * 1j] * 2


@check
def sums_of_integers_outgrow_64_bits() -> None:
    """Python integers are summed without overflow."""
    values = of_all_ranks(lambda number: 2**63 - 1 - number)
    assert (all_reduce(values[rank()], "sum"), all_reduce(values[rank()], "min")) == (sum(values), min(values))


@check
def gradients_cross_processes() -> None:
    """Gradients of the sum of all ranks' losses equal those of a single process."""

    def loss(weight, reduced, gathered, sent):
        reductions = reduced["mean"] ** 2 + reduced["sum"] + reduced["max"] * 2 + reduced["min"]
        return (torch.tensor([1.0, 3.0]) * weight * (reductions + (gathered**2).sum(0) + sent)).sum()

    xs = of_all_ranks(lambda number: (torch.tensor([1.0, -2.0]) * (number + 1)).requires_grad_())
    x = xs[rank()].detach().clone().requires_grad_()
    reduced = {op: all_reduce(x, op) for op in ("mean", "sum", "max", "min")}
    loss(rank() + 1, reduced, all_gather(x), broadcast(x, src=1)).backward()
    stacked = torch.stack(xs)
    reduced = {"mean": stacked.mean(0), "sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}
    sum(loss(number + 1, reduced, stacked, xs[1]) for number in range(len(xs))).backward()
    torch.testing.assert_close(x.grad, xs[rank()].grad)


@pytest.mark.parametrize("name", check)
def test_a_check_holds_on_all_ranks(name: str) -> None:
    """What the check's docstring says."""
    check.assert_holds(name)


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


def test_different_calls_raise_on_all_ranks():
    """If ranks make different calls, all of them raise an error with every call instead of hanging."""

    @distributed(processes=2, timeout=120)
    def run():
        calls = [
            lambda: all_reduce(torch.zeros(3 + rank()), "mean"),
            lambda: all_gather(1 if rank() else 1.0),
            lambda: all_reduce({f"loss{rank()}": 1.0}, "mean"),
            lambda: all_reduce(1.0, "max" if rank() else "min"),
            lambda: all_reduce(1.0, "mean") if rank() else barrier(),
            lambda: barrier(f"stage {rank()}"),
            lambda: broadcast(1.0, src=rank()),
            lambda: all_reduce(torch.zeros(1, requires_grad=rank() == 0), "mean"),
        ]
        texts = []
        for call in calls:
            with pytest.raises(SyncError, match=r"rank 0 is at .*; rank 1 is at ") as caught:
                call()
            texts.append(str(caught.value))
        return texts

    first, second = run.all_ranks()
    assert first == second


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


class NoTextError(Exception):
    def __str__(self) -> str:
        raise LookupError("no text")


def test_an_error_without_a_text_in_main_first_reaches_all():
    """Rank 0's exception has a `__str__` that raises: the other ranks do not wait for it."""

    @distributed(processes=2, timeout=60)
    def run():
        try:
            with main_first():
                if rank() == 0:
                    raise NoTextError
        except NoTextError:
            return "its own"
        except SyncError as exc:
            return str(exc)

    own, other = run.all_ranks()
    assert own == "its own"
    assert "main_first failed on rank 0: NoTextError: (no text" in other


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
