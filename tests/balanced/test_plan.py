"""Plans: profiling, printing, saving, reuse, and models that are not worth splitting."""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
import threading
import time
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from balanced.models import CASES, Gpt, assert_equal_gradients, batch_of, loss_of, pipelined, plan_for, rows, seeded
from torch import nn

from parallelize import parallel_model
from parallelize.backends.balanced.engine import BalancedEngine
from parallelize.backends.balanced.executor import Executor
from parallelize.backends.balanced.microbatch_run import active_run
from parallelize.backends.balanced.plan import Plan, PlannerOptions, plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.errors import ConfigError
from parallelize.plugins.base import Inner, Session

pytestmark = pytest.mark.slow

INPUTS = batch_of(CASES["gpt, tied"])
X = INPUTS[0][0]


class Sleeping(torch.autograd.Function):
    """Takes time in proportion to the samples, and lets other threads run meanwhile, as a GPU does."""

    backwards: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds * len(x)
        time.sleep(ctx.seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        began = time.perf_counter()
        time.sleep(2 * ctx.seconds)
        Sleeping.backwards.append((began, time.perf_counter()))
        return gradient, None


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeping.apply(self.layer(x), self.seconds)


@pytest.mark.parametrize("memory", [None, 10**7])
def test_submodules_that_are_not_called(memory: int | None) -> None:
    """Attention computes with the parameters of its projection: there is nowhere to split it, as the plan says."""
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(8, 4, 8)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4, memory=memory)):
        loss_of(model(x, x, x, need_weights=False)[0]).backward()
        assert not plan(model).is_split
        assert "forward calls no submodules" in str(plan(model))


class Terminal(io.StringIO):
    """A stream that is a terminal, where planning shows that it runs."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("last", [nn.Identity(), nn.BatchNorm1d(4), nn.Dropout()], ids=lambda each: type(each).__name__)
def test_planning_takes_the_time_of_ten_steps(
    last: nn.Module, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Planning and validation run ten batches, or the log says why; a line on the terminal tells what runs."""
    model = nn.Sequential(*(Slow(0.001) for _ in range(6)), last)
    counts: list[int] = []
    model[0].register_forward_pre_hook(lambda _module, args: counts.append(len(args[0])))
    monkeypatch.setattr(sys, "stderr", Terminal())
    backend = BalancedBackend(devices=("cpu", "cpu"))
    with caplog.at_level(logging.INFO), parallel_model(model, backend=backend):
        model(torch.randn(16, 4))
    assert sys.stderr.getvalue().startswith("parallelize: profiling Sequential on its first batch")
    assert sum(counts) / 16 - 1 <= 10 or "planning may have taken more than the time of 10 steps: " in caplog.text


def overlaps(intervals: list[Any]) -> bool:
    return any(a is not b and a[0] < b[1] and b[0] < a[1] for a in intervals for b in intervals)


def test_the_slowest_submodule_gets_its_own_device() -> None:
    """Stages are chosen by measured time, not by parameters: three fast layers balance one slow layer."""
    model = nn.Sequential(*(Slow(seconds) for seconds in (0.001, 0.001, 0.001, 0.003)))
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(torch.randn(8, 4))).backward()
    found = plan(model)
    assert found.bounds == (0, 3, 4)
    assert found.events == ("0.layer", "1.layer", "2.layer", "3.layer")


def test_stages_work_at_the_same_time() -> None:
    """Forwards of different stages overlap, those of one stage do not; so do backwards of micro-batches."""
    log: list[tuple[str, float, float]] = []
    began: dict[int, float] = {}
    model = nn.Sequential(*(Slow(0.002) for _ in range(4)))
    for index, module in enumerate(model):
        module.register_forward_pre_hook(lambda *_: began.update({threading.get_ident(): time.perf_counter()}))
        module.register_forward_hook(
            lambda *_, name=str(index): log.append((name, began[threading.get_ident()], time.perf_counter()))
        )
    x = torch.randn(8, 4)
    loss_of(model(x)).backward()
    assert not overlaps([interval for _, *interval in log])
    options: dict[str, Any] = {"events": ("0", "1", "2", "3"), "bounds": (0, 1, 2, 3, 4), "stages": 4}
    with pipelined(model, rows_of_four(8), microbatches=8, **options):
        model(x)
        log.clear()
        Sleeping.backwards.clear()
        loss_of(model(x)).backward()
    assert overlaps([interval for _, *interval in log])
    for stage in "0123":
        assert not overlaps([interval for name, *interval in log if name == stage])
    assert overlaps(Sleeping.backwards)


def rows_of_four(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(samples, 4),), {}


def test_no_speedup_warns_and_leaves_the_model_unsplit(caplog: pytest.LogCaptureFixture) -> None:
    """A tiny model is not split: a warning gives the reason, and forward runs in the caller's thread."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    inputs = rows(8)
    with caplog.at_level(logging.WARNING), parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"))):
        output = model(*inputs[0])
        loss_of(output).backward()
        assert type(output.grad_fn).__name__ == "AddmmBackward0"
    assert not plan(model).is_split
    assert "no gain" in caplog.text
    assert "backend='ddp'" in str(plan(model))


def test_one_device_is_the_reason_given() -> None:
    """The plan names the single device as the reason, not a predicted time."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with parallel_model(model, backend=BalancedBackend(devices=("cpu",))):
        loss_of(model(rows(8)[0][0])).backward()
    assert plan(model).why == "no gain: only one device; consider backend='ddp'"


def test_a_model_without_submodules_is_left_unsplit() -> None:
    """A single layer cannot be split, and runs."""
    model = nn.Linear(8, 3)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"))):
        assert model(torch.randn(4, 8)).shape == (4, 3)
    assert "calls no submodules" in plan(model).why


def test_planning_leaves_no_trace() -> None:
    """Planning restores buffers, RNG state and modes, and leaves no gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()
    x = torch.randn(8, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=2)), torch.no_grad():
        torch.manual_seed(0)
        before = torch.get_rng_state()
        model(x)  # is planned and validated
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        model(x)
        assert torch.equal(torch.get_rng_state(), after)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert [module.training for module in model] == [True, False, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_limits_move_the_split_point_and_enable_recomputation() -> None:
    """The device with the larger limit gets more; limits below the activations enable recomputation."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)) for _ in range(6)))
    x = torch.randn(256, 8)

    def planned(memory: Any) -> Plan:
        with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4, memory=memory)):
            loss_of(model(x)).backward()
        return plan(model)

    roomy = planned(100 * 2**20)
    assert not roomy.recompute
    total = sum(roomy.memory_bytes)
    uneven = planned((int(total * 0.3), int(total)))
    assert min(uneven.memory_bytes) <= total * 0.3
    tight = planned(int(total * 0.35))  # up to a quarter of the total are copies at a border
    assert tight.recompute
    assert max(tight.memory_bytes) <= total * 0.35
    assert "without recomputing, no split fits" in tight.why


def test_a_plan_can_be_saved_and_reused(tmp_path: Path) -> None:
    """A saved and loaded plan is used unchanged; the same split points give the same gradients."""
    model = seeded(Gpt)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        loss_of(model(X)).backward()
        plan(model).save(tmp_path / "plan.json")
    first = model.tokens.weight.grad.clone()
    model.zero_grad()
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), plan=loaded)):
        loss_of(model(X)).backward()
    assert plan(model) == loaded
    torch.testing.assert_close(model.tokens.weight.grad, first)


def test_a_plan_in_a_file(tmp_path: Path) -> None:
    """The first run writes its plan, later ones read it; a file that does not fit the run is an error."""
    path = tmp_path / "plan.json"

    def run(model: nn.Module, plan_path: Any, **options: Any) -> Plan:
        backend = BalancedBackend(devices=("cpu", "cpu"), plan=plan_path, **{"microbatches": 4, **options})
        with parallel_model(model, backend=backend):
            loss_of(model(X)).backward()
        return plan(model)

    first = run(seeded(Gpt), path)
    assert [*tmp_path.iterdir()] == [path]
    assert run(seeded(Gpt), str(path)) == first == Plan.load(path)
    with pytest.raises(ConfigError, match=r"plan= is for Gpt(.|\n)*remove its file"):
        run(nn.Sequential(seeded(Gpt)), path)
    with pytest.raises(ConfigError, match=r"plan= is for 4 micro-batches, with microbatches=2(.|\n)*delete the file"):
        run(seeded(Gpt), path, microbatches=2)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"plan.json is not a plan"):
        run(seeded(Gpt), path)
    assert run(seeded(Gpt), tmp_path / "new" / "plan.json") == Plan.load(tmp_path / "new" / "plan.json")
    for unwritable in (path / "plan.json", tmp_path / "new"):
        with pytest.raises(ConfigError, match=rf"the plan cannot be written to {unwritable}: (Not|Is|File)"):
            first.save(unwritable)
    assert {*tmp_path.iterdir()} == {path, tmp_path / "new"}


def test_a_plan_can_be_printed() -> None:
    """The text shows the stages with bars, the speedup beside the ideal one, and the reason."""
    drawn = plan_for(
        seeded(Gpt),
        INPUTS,
        forward_s=(0.03, 0.01),
        backward_s=(0.06, 0.02),
        memory_bytes=(2.0**21, 2.0**21),
        unsplit_s=0.4,
        predicted_s=0.3,
        why="because",
    )
    text = str(drawn).splitlines()
    assert text[0] == "Gpt: 2 stages, 4 micro-batches, 1.33x as fast as one device (ideal 1.60x)"
    assert "██████████████████······  75% of time" in text[1]
    assert "████████████············  50% of memory 2.0 MiB" in text[2]
    assert text[1].startswith("  0  cpu  tokens .. ")
    assert text[-1] == "  why: because"


def test_a_plan_with_pipelines(tmp_path: Path) -> None:
    """Each stage has a device per pipeline; files without the number of pipelines are plans of one."""
    devices = tuple(f"cuda:{index}" for index in range(4))
    made = plan_for(seeded(Gpt), INPUTS, devices=devices, pipelines=2, memory_bytes=(2.0**21,) * 4)
    text = str(made).splitlines()
    assert text[0] == "Gpt: 2 pipelines of 2 stages, 4 micro-batches (ideal 2.67x)"
    assert text[2].startswith("  1  cuda:1 cuda:3  ")
    path = tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    written = json.loads(path.read_text())
    for wrong in ({"pipelines": 3}, {"pipelines": 0}, {"microbatches": 1}, {"memory_bytes": [1.0, 1.0]}):
        path.write_text(json.dumps({**written, **wrong}))
        with pytest.raises(ConfigError, match="it needs"):
            Plan.load(path)
    del written["pipelines"]
    path.write_text(json.dumps({**written, "devices": devices[:2], "memory_bytes": []}))
    assert Plan.load(path).pipelines == 1


def test_plans_of_equal_models_fit_each_other() -> None:
    """A plan fits another model of the same class and sizes, as after a restart."""
    made = plan_for(seeded(Gpt), INPUTS)
    model = Gpt()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), plan=made)):
        assert model(X).shape == (8, 8, 11)


class Droppy(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.a(x)))


def assert_masks_of_backward_are_those_of_forward(model: Any) -> None:
    """Check by the gradient of b, which is linear in dropout's output, which masks backward has used."""
    x = torch.randn(8, 8)
    kept: list[torch.Tensor] = []
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        output = model(x)
        output.sum().backward()
        kept.append(output.detach())
        # sum of outputs = sum of W * dL/dW + bias * dL/dbias
        weight, bias = model.b.weight, model.b.bias
        total = (weight * weight.grad).sum() + (bias * bias.grad).sum()
        torch.testing.assert_close(total, output.sum(), rtol=1e-4, atol=1e-4)
    assert torch.equal(*kept)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_validation_pass_may_come_first(recompute: bool) -> None:
    """After a first batch in evaluation mode, seeds and recomputation are right in training with dropout."""
    model = seeded(Droppy).eval()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4, recompute=recompute)):
        with torch.no_grad():
            model(torch.randn(8, 8))
        model.train()
        assert_masks_of_backward_are_those_of_forward(model)


def test_dropout_in_two_pipelines_depends_on_the_seed_only() -> None:
    """Masks are those of one pipeline with the same seed, in every run."""
    found, inputs = [], ((torch.ones(8, 8),), {})
    for pipelines in (1, 2, 2):
        devices = ("cpu",) * 2 * pipelines
        with pipelined(seeded(Droppy), inputs, stages=2, devices=devices, pipelines=pipelines) as model:
            assert_masks_of_backward_are_those_of_forward(model)
            torch.manual_seed(3)
            found.append(model(*inputs[0]).detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_plan_made_without_dropout_works_for_a_model_with_it(recompute: bool) -> None:
    """A plan fits a model with other dropout: masks depend on the seed, and recomputation draws them again."""
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4, recompute=recompute)
    with parallel_model(seeded(lambda: Droppy(0.0)), backend=backend) as before:
        before(torch.randn(8, 8))
        made = plan(before)
    model = seeded(Droppy)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), plan=made)):
        with torch.no_grad():
            model.eval()(torch.randn(8, 8))
        model.train()
        assert_masks_of_backward_are_those_of_forward(model)


class Scarce(nn.Module):
    """Runs out of memory with more than `most` samples, as an accelerator does, or if its tensors are still there."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            y = self.layers(x)
            Scarce.kept.append(weakref.ref(y))
            raise torch.OutOfMemoryError(f"{len(y)} samples")
        if any(each() is not None for each in Scarce.kept):
            raise torch.OutOfMemoryError("what has run out of memory is not freed")
        return self.layers(x)


@pytest.mark.parametrize("most", [2, 16])
def test_running_out_of_memory_is_a_measurement(most: int) -> None:
    """A batch that fits in micro-batches only is planned, compared on as many samples as fit, and trains."""
    model, x = seeded(lambda: Scarce(most)), torch.randn(32, 8)
    alone = copy.deepcopy(model.layers)
    loss_of(alone(x)).backward()
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=32 // most)):
        loss_of(model(x)).backward()
    assert (plan(model).is_split, plan(model).samples) == (True, 32)
    assert_equal_gradients(model.layers, alone)


class Pair(nn.Module):
    """Fits in two pipelines of two devices, unless forward changes a buffer, or the second pipeline has no memory."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble
        self.layers = nn.Sequential(*(Slow(0.0002) for _ in range(8)))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = active_run()
        if self.trouble == "memory" and run is not None and run.pipeline == 1:
            raise torch.OutOfMemoryError("the second pipeline is full")
        if self.trouble == "buffer":
            self.steps += 1
        return self.layers(x).mean(1)


@pytest.mark.parametrize(
    ("trouble", "pipelines", "why", "logged"),
    [
        ("none", 2, "it does not need all of them", ""),
        ("buffer", 1, "in one pipeline: forward changes steps", "10 steps: forward changes steps"),
        (
            "memory",
            1,
            "shortest predicted step",
            "10 steps: more memory was needed than predicted (the second pipeline",
        ),
    ],
)
def test_a_plan_with_pipelines_that_fails_is_made_again(
    trouble: str, pipelines: int, why: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where several pipelines do not compute what one does, or need too much memory, there is one; the log says why."""
    model, x = seeded(lambda: Pair(trouble)), torch.randn(16, 4)
    alone = copy.deepcopy(model)
    loss_of(alone(x)).backward()
    with (
        caplog.at_level(logging.INFO),
        parallel_model(model, backend=BalancedBackend(devices=("cpu",) * 4, memory=3000)),
    ):
        loss_of(model(x)).backward()
    assert (plan(model).pipelines, len(plan(model).devices)) == (pipelines, 4)
    assert why in plan(model).why
    assert logged in caplog.text
    assert_equal_gradients(model, alone)
    assert torch.equal(model.steps, alone.steps)


def test_what_a_plan_has_validated_is_known_to_this_plan_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are validated again with other stages or recomputation; a restriction to one pipeline stays known."""
    model, inputs = seeded(lambda: Pair("buffer")), ((torch.randn(16, 4),), {})
    made = plan_for(model, inputs, devices=("cpu",) * 4, pipelines=2)
    engine = BalancedEngine(
        Inner(model, original_methods={"forward": model.forward}, session=Session()),
        devices=(torch.device("cpu"),) * 4,
        output_device=torch.device("cpu"),
        options=PlannerOptions(),
        given=lambda: made,
        path=None,
        ddp_options=None,
    )
    used: list[int] = []
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *args, pipelines, **more: used.append(pipelines) or run(*args, **more))
    with engine._pipeline(made) as pipeline:
        pipeline(*inputs[0])
    with engine._pipeline(replace(made, measured_s=1.0)) as pipeline:
        assert len(pipeline.kinds) == 1
        used.clear()
        pipeline(*inputs[0])
    assert used == [1]
    for other in ({"recompute": True}, {"events": made.events[::-1]}, {"pipelines": 1, "devices": ("cpu",) * 2}):
        with engine._pipeline(replace(made, **other)) as pipeline:
            assert not pipeline.kinds
    engine.close(failed=False)


def test_a_model_of_which_no_sample_fits() -> None:
    """An error tells the number of samples."""
    model = Scarce(0)
    with (
        parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)),
        pytest.raises(ConfigError, match="a forward of 1 samples does not fit"),
    ):
        model(torch.randn(32, 8))


class Queue(nn.Module):
    """Writes each batch into a queue, at a pointer that only a full batch keeps aligned."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.register_buffer("queue", torch.zeros(16, 16))
        self.at = 0
        if is_buffer:
            del self.at
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, at = self.layers(x), int(self.at)
        self.queue[at : at + len(y)] = y.detach()
        self.at = self.at * 0 + (at + len(y)) % len(self.queue)
        return y


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_queue_that_only_full_batches_fit(is_buffer: bool) -> None:
    """Smaller micro-batches of planning leave the pointer where it was; where devices have limits, too."""
    model = seeded(lambda: Queue(is_buffer=is_buffer))
    backend = BalancedBackend(devices=("cpu", "cpu"), memory=10**7, microbatches=2)
    with warnings.catch_warnings(), parallel_model(model, backend=backend):
        warnings.simplefilter("ignore")  # such batches are not split
        for steps in range(1, 4):
            loss_of(model(torch.ones(8, 16))).backward()
            assert int(model.at) == 8 * steps % 16


class Pulse(nn.Module):
    """Reads a number, so that its batches have no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, level: torch.Tensor) -> torch.Tensor:
        return self.layers(level * torch.ones(2, 64))


def test_a_batch_without_a_batch_dimension_on_a_model_that_fits_on_no_device() -> None:
    """The model is divided, and the batch runs through its stages as a whole."""
    model, level = seeded(Pulse), torch.tensor(0.5)
    alone = copy.deepcopy(model)
    loss_of(alone(level)).backward()
    memory = 3 * sum(each.nbytes for each in model.parameters())
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), memory=memory)):
        loss_of(model(level)).backward()
        assert (len(plan(model).devices), plan(model).microbatches) == (2, 1)
    assert_equal_gradients(model, alone)
