"""Questions to a machine with a GPU whose answers decide what is believed of it without one: one line each.

    python tests/gpu/five_minutes.py                        all, what is unexpected first
    python tests/gpu/five_minutes.py average_sum_waits      one of them
    python tests/fake_cuda python tests/gpu/five_minutes.py on the pretended device

Each question is a function, and runs in a process of its own, so that one that crashes or hangs stops no other. The
exit status is the number of answers that are not the expected ones; no answer is one of these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).parents[2]
MIB = 2**20


@dataclass(frozen=True)
class Answer:
    """What a question has found.

    Args:
        expected: what should be found.
        found: what is found here.
        is_expected: whether they agree.
    """

    expected: str
    found: str
    is_expected: bool


@contextlib.contextmanager
def one_rank_of_nccl() -> Iterator[None]:
    """Initialize the default group of a run on GPUs: gloo and NCCL, bound to the device."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def error_of(call: Callable[[], object]) -> str:
    """Return the type of the exception that a call raises, or "works"."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any error is an answer
        return type(error).__name__
    return "works"


def new_groups_of_a_bound_default() -> Answer:
    """Return which backends a new group can have: those of the package, and "cpu:gloo", which torch refuses."""
    expected = {None: "works", "gloo": "works", "nccl": "works", "cpu:gloo": "RuntimeError"}
    with one_rank_of_nccl():
        found = {backend: error_of(lambda backend=backend: dist.new_group(backend=backend)) for backend in expected}
    return Answer(str(expected), str(found), found == expected)


def broadcast_of_a_transposed_tensor() -> Answer:
    """Return whether NCCL refuses a dense tensor in another order, and the package's own broadcast does not."""
    from parallelize.backends.broadcast import broadcast_from_rank_0

    with one_rank_of_nccl():
        transposed = torch.randn(4, 8, device="cuda").t()
        found = {
            "torch": error_of(lambda: dist.broadcast(transposed, 0)),
            "package": error_of(lambda: broadcast_from_rank_0([transposed])),
        }
    expected = {"torch": "ValueError", "package": "works"}
    return Answer(str(expected), str(found), found == expected)


def memory_of_one_more_communicator() -> Answer:
    """Return the device memory that another group of NCCL takes."""
    most = 300
    with one_rank_of_nccl():
        dist.all_reduce(torch.ones(1, device="cuda"))
        before = torch.cuda.mem_get_info()[0]
        group = dist.new_group()
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
        torch.cuda.synchronize()
        taken = (before - torch.cuda.mem_get_info()[0]) / MIB
    return Answer(f"at most {most} MiB", f"{taken:.0f} MiB", taken <= most)


def workspaces_of_cublas() -> Answer:
    """Return what the first product takes of torch's memory, and what the first one in backward takes besides."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    product = x @ x
    in_forward = (torch.cuda.memory_allocated() - before) / MIB
    product.sum().backward()
    in_backward = (torch.cuda.memory_allocated() - before) / MIB - in_forward
    size = 32 if torch.cuda.get_device_capability()[0] >= 9 else 8
    is_expected = abs(in_forward - size) < 1 and in_backward < size + 1
    found = f"{in_forward:.1f} MiB, {in_backward:.1f} more in backward"
    return Answer(f"{size} MiB, and at most as much in backward", found, is_expected)


def milliseconds_of(call: Callable[[], object]) -> float:
    """Return the device's time for a call."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copies_overlap_compute() -> Answer:
    """Return whether a batch is copied while the device computes, with prefetch=1, and not with prefetch=0."""
    from parallelize.data.prefetch import move_batches

    device, steps = torch.device("cuda", 0), 8
    batch = torch.ones(32 * MIB).pin_memory()  # 128 MiB
    batch.to(device)
    copy_ms = min(milliseconds_of(lambda: batch.to(device, non_blocking=True)) for _ in range(3))
    cycles = int(copy_ms * 10_000_000 / milliseconds_of(lambda: torch.cuda._sleep(10_000_000)))
    compute_ms = min(milliseconds_of(lambda: torch.cuda._sleep(cycles)) for _ in range(3))

    def loop(prefetch: int) -> None:
        for _ in move_batches(iter([batch] * steps), device, prefetch=prefetch, are_fresh=True):
            torch.cuda._sleep(cycles)

    step_ms = {}
    for prefetch in (1, 0):
        loop(prefetch)  # lets the allocator take its memory
        step_ms[prefetch] = milliseconds_of(lambda prefetch=prefetch: loop(prefetch)) / steps
    found = (
        f"copy {copy_ms:.1f} ms, compute {compute_ms:.1f} ms, a step {step_ms[1]:.1f} ms, {step_ms[0]:.1f} ms without"
    )
    # The first of eight copies has nothing to run beside.
    is_expected = step_ms[1] < 0.75 * (copy_ms + compute_ms) < step_ms[0] * 1.05
    return Answer("a step with prefetch=1 takes the longer of both, without it their sum", found, is_expected)


def waits_in_a_step(average: str) -> float:
    """Return for how many operations of a step the host waits for the device, in one of two ranks on one GPU."""
    from parallelize import distributed, parallel_model

    @distributed(gpus=[0, 0], process_group_backend="gloo")
    def count() -> float:
        model, found = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0
        x, y = torch.randn(8, 8, device="cuda"), torch.randint(4, (8,), device="cuda")
        with parallel_model(model, average=average):
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            for step in range(14):
                torch.cuda.set_sync_debug_mode("warn" if step >= 10 else "default")
                with warnings.catch_warnings(record=True) as raised:
                    warnings.simplefilter("always")
                    reduction = "sum" if average == "sum" else "mean"
                    loss = nn.functional.cross_entropy(model(x), y, reduction=reduction)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                found += sum("called a synchronizing" in str(warning.message) for warning in raised)
            torch.cuda.set_sync_debug_mode("default")
        return found / 4

    return count()


def average_ranks_waits() -> Answer:
    """Return the waits for the device in a step with average="ranks", the default."""
    found = waits_in_a_step("ranks")
    return Answer("0 waits in a step", f"{found:g}", found == 0)


def average_sum_waits() -> Answer:
    """Return the waits for the device in a step with average="sum"."""
    found = waits_in_a_step("sum")
    return Answer("0 waits in a step", f"{found:g}", found == 0)


def average_tokens_waits() -> Answer:
    """Return the waits for the device in a step with average="tokens"."""
    found = waits_in_a_step("tokens")
    return Answer("0 waits in a step", f"{found:g}", found == 0)


_PRODUCT = """
import warnings, torch
torch.use_deterministic_algorithms(True, warn_only=True)
x = torch.randn(64, 64, device="cuda")
with warnings.catch_warnings(record=True) as raised:
    warnings.simplefilter("always")
    x @ x
print("warns" if any("deterministic" in str(warning.message) for warning in raised) else "is silent")
"""


def deterministic_products_warn() -> Answer:
    """Return whether a product warns in deterministic mode, without and with CUBLAS_WORKSPACE_CONFIG."""
    found = {}
    for config in ("", ":4096:8"):
        environ = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
        environ |= {"CUBLAS_WORKSPACE_CONFIG": config} if config else {}
        done = subprocess.run([sys.executable, "-c", _PRODUCT], env=environ, capture_output=True, text=True, check=True)
        found[config or "not set"] = done.stdout.strip()
    expected = {"not set": "warns", ":4096:8": "is silent"}
    return Answer(str(expected), str(found), found == expected)


def two_ranks_train_as_one() -> Answer:
    """Return how far the weights of two ranks on one GPU, over gloo, are from those of one process."""
    from parallelize import distributed, parallel_model, rank

    torch.backends.cuda.matmul.allow_tf32 = False
    data = torch.randn(4, 32, 8, generator=torch.Generator().manual_seed(1))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def fit(model: nn.Module, part: slice) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for batch in data[:, part].cuda():
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()

    @distributed(gpus=[0, 0], process_group_backend="gloo")
    def run() -> torch.Tensor:
        model = make()
        with parallel_model(model):
            return fit(model, slice(16 * rank(), 16 * rank() + 16))

    one = fit(make().cuda(), slice(None))
    difference = max((weights - one).abs().max().item() for weights in run.all_ranks())
    return Answer("weights differ by at most 1e-5", f"{difference:.1g}", difference <= 1e-5)


QUESTIONS: tuple[Callable[[], Answer], ...] = (
    new_groups_of_a_bound_default,
    broadcast_of_a_transposed_tensor,
    memory_of_one_more_communicator,
    workspaces_of_cublas,
    copies_overlap_compute,
    average_ranks_waits,
    average_sum_waits,
    average_tokens_waits,
    deterministic_products_warn,
    two_ranks_train_as_one,
)


def answer_of(question: Callable[[], Answer], timeout_s: float) -> Answer:
    """Return the answer of a question's own process, which is killed with its workers after some seconds."""
    command = [sys.executable, __file__, "--answer", question.__name__]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Answer("an answer", f"none within {timeout_s:.0f} s", is_expected=False)
    lines = [line for line in out.splitlines() if line.startswith('{"expected"')]
    if lines:
        return Answer(**json.loads(lines[-1]))
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "no output")
    return Answer("an answer", f"exit status {process.returncode}: {last}", is_expected=False)


def line_of(question: Callable[[], Answer], answer: Answer, seconds: float) -> str:
    """Return the line of an answer."""
    name = question.__name__
    verdict = "as expected" if answer.is_expected else "UNEXPECTED "
    return f"{verdict}  {name}: expected {answer.expected}; found {answer.found} ({seconds:.0f} s)"


def ask(questions: list[Callable[[], Answer]], *, seconds: float, seconds_each: float) -> int:
    """Print a line for each answer, those that are not expected first; return how many these are."""
    end = time.monotonic() + seconds
    lines: list[tuple[bool, str]] = []
    for question in questions:
        began = time.monotonic()
        answer = answer_of(question, max(1.0, min(seconds_each, end - began)))
        line = line_of(question, answer, time.monotonic() - began)
        print(f"answered: {line}", file=sys.stderr, flush=True)  # all that is left if this process is killed
        lines.append((answer.is_expected, line))
    print("\n".join(line for _, line in sorted(lines, key=lambda entry: entry[0])))
    return sum(not is_fine for is_fine, _ in lines)


def main() -> int:
    """Ask the questions of the command line."""
    by_name = {question.__name__: question for question in QUESTIONS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"questions: {', '.join(by_name)}")
    parser.add_argument("--seconds", type=float, default=280.0, help="for all of them")
    parser.add_argument("--seconds-each", type=float, default=60.0, help="for one of them")
    parser.add_argument("--answer", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in by_name]:
        parser.error(f"no such question: {', '.join(unknown)}")
    if options.answer is None:
        chosen = [by_name[name] for name in options.names or by_name]
        return ask(chosen, seconds=options.seconds, seconds_each=options.seconds_each)
    print(json.dumps(asdict(by_name[options.answer]())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
