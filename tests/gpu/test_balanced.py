"""Pipelines on GPUs: every copy between devices, and no autograd node on a GPU that waits."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from balanced.models import (
    CASES,
    Chain,
    Gpt,
    assert_equal_gradients,
    batch_of,
    gradients,
    loss_of,
    not_split_once,
    pipelined,
    plan_for,
    seeded,
    tensors,
)
from cublas import take_workspaces
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from parallelize import ConfigError, parallel_model, shard_loader
from parallelize.backends.balanced import profiling
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.run.containers import map_leaves

pytestmark = pytest.mark.gpu

PAIRS = [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")]
# Other devices than the first: every copy between devices happens.
MORE = [
    pytest.param(
        devices,
        marks=[
            pytest.mark.gpu2,
            pytest.mark.skipif(torch.cuda.device_count() < len(devices), reason=f"needs {len(devices)} CUDA devices"),
        ],
    )
    for devices in (("cuda:1", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:3", "cuda:2", "cuda:0"))
]


def to_gpu(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize("devices", [*PAIRS, *MORE], ids="+".join)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_one_stage(name: str, devices: tuple[str, ...]) -> None:
    """On one GPU twice, on CPU and GPU, and on several GPUs, outputs and gradients are those of one stage."""
    case = CASES[name]
    inputs, model = to_gpu(batch_of(case)), seeded(case.make).cuda()
    alone = copy.deepcopy(model)
    found = []
    for each, places in ((model, devices), (alone, ("cuda:0",))):
        made = plan_for(each, inputs, stages=len(places), devices=places)
        backend = BalancedBackend(devices=places, plan=made, batch_dim=case.batch_dim)
        with parallel_model(each, backend=backend), not_split_once(None):
            output = each(*inputs[0], **inputs[1])
            loss_of(output).backward()
            assert {leaf.device for leaf in tensors(output)} == {torch.device("cuda:0")}
        found.append(output)
    for got, want in zip(tensors(found[0]), tensors(found[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert {each.device for each in model.parameters()} == {torch.device("cuda:0")}
    assert_equal_gradients(model, alone, rtol=1e-2, atol=1e-3)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("devices", PAIRS, ids="+".join)
def test_a_loop_with_an_optimizer_made_before(devices: tuple[str, str]) -> None:
    """A profiled and split model, with AdamW state from before the block, trains on the devices of its stages."""
    model = seeded(Gpt).cuda()
    x = torch.randint(11, (8, 8), device="cuda:0")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    with parallel_model(model, backend=BalancedBackend(devices=devices, microbatches=4)):
        for _ in range(12):
            _, loss = model(x, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert len(plan(model).devices) <= 2
    state = {each.device for kept in optimizer.state.values() for each in kept.values() if each.dim() > 0}
    assert state == {torch.device("cuda:0")}


class Reader(nn.Module):
    """Layers that read two tensors, the second of which is on the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.is_reentrant = nn.Linear(8, 8), False
        self.layers = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = h = torch.tanh(self.first(x))
        for layer in self.layers:
            h = torch.tanh(checkpoint(layer, h, memory, use_reentrant=self.is_reentrant))
        return h


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("devices", [*PAIRS, *MORE], ids="+".join)
def test_checkpoints_with_arguments_on_two_devices(devices: tuple[str, ...], is_reentrant: bool) -> None:
    """Backward recomputes a unit inside a stage, whose second argument is on another device."""
    model, x = seeded(Reader).cuda(), torch.randn(8, 8).cuda()
    model.is_reentrant = is_reentrant
    alone = copy.deepcopy(model)
    made = plan_for(model, ((x,), {}), stages=len(devices), devices=devices)
    with parallel_model(model, backend=BalancedBackend(devices=devices, plan=made)), not_split_once(None):
        loss_of(model(x)).backward()
    loss_of(alone(x)).backward()
    assert_equal_gradients(model, alone, rtol=1e-3, atol=1e-4)


def test_dropout_on_a_gpu_depends_on_the_seed_only() -> None:
    """Masks drawn on a GPU are bitwise equal with one seed."""
    inputs = to_gpu(batch_of(CASES["gpt, tied"]))
    found = []
    for _ in range(2):
        model = seeded(lambda: Gpt(dropout=0.5)).cuda()
        with pipelined(model, inputs, device="cuda:0"):
            torch.manual_seed(0)
            output = model(*inputs[0])
            loss_of(output).backward()
        found.append((output.detach(), gradients(model)["blocks.0.qkv.weight"]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_a_side_stream_is_used_by_the_pipeline() -> None:
    """Called on the user's stream, every stage computes there: outputs are right without a synchronization."""
    inputs = to_gpu(batch_of(CASES["gpt, tied"]))
    model = seeded(Gpt).cuda()
    expected = model(*inputs[0])
    with pipelined(model, inputs, device="cuda:0"), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        output = model(*inputs[0]) * 1.0
        torch.cuda.current_stream().synchronize()
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:1", "cuda:0")], ids="+".join)
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_batch_on_another_device_is_moved(device: str, devices: tuple[str, str]) -> None:
    """Inputs may be on the CPU or on another GPU: outputs are on the run's device, with the gradients of one stage."""
    if "cuda:1" in (device, *devices) and torch.cuda.device_count() == 1:
        pytest.skip("needs two CUDA devices")
    inputs = to_gpu(batch_of(CASES["gpt, tied"]))
    model = seeded(CASES["gpt, tied"].make).cuda()
    alone = copy.deepcopy(model)
    loss_of(alone(*inputs[0])).backward()
    with parallel_model(model, backend=BalancedBackend(devices=devices, microbatches=2)):
        output = model(*(each.to(device) for each in inputs[0]))
        assert output.device == torch.device("cuda:0")
        loss_of(output).backward()
    assert_equal_gradients(model, alone, rtol=1e-2, atol=1e-3)


def test_a_device_that_is_not_named_is_not_used() -> None:
    """With devices on the second GPU only, the first gets no memory, batch or current device."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two CUDA devices")
    torch.cuda.synchronize(0)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    model = seeded(Gpt)
    with parallel_model(model, backend=BalancedBackend(devices=("cuda:1", "cuda:1"), microbatches=2)):
        for x in shard_loader([torch.randint(11, (8, 8))]):
            assert x.device == torch.device("cuda:1")
            assert torch.cuda.current_device() == 1
            model(x, x)[1].backward()
    assert torch.cuda.max_memory_allocated(0) == before


class Wide(nn.Module):
    """Blocks with few weights, each of which keeps 32 KiB per sample."""

    def __init__(self, blocks: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(2**13), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(2**13, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skip(nn.Module):
    """Adds its input to what its layers make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


@pytest.mark.gpu2
def test_units_of_a_model_that_fits_on_no_device() -> None:
    """An addition of tensors that are on two devices while the model is profiled does not make its units larger."""
    found = []
    for memory in (2**33, 270_000):
        model = nn.Sequential(Skip(), Skip(), Skip())
        backend = BalancedBackend(devices=("cuda:0", "cuda:1"), memory=memory, microbatches=2)
        with parallel_model(model, backend=backend):
            loss_of(model(torch.randn(16, 64))).backward()
        found.append(plan(model))
    assert "fits on one device" not in found[1].why
    assert len({each.units for each in found}) == 1


@contextlib.contextmanager
def limited(mebibytes: float) -> Iterator[None]:
    """Limit what this process allocates on each GPU, beyond what it holds already."""
    devices = range(torch.cuda.device_count())
    for device in devices:
        take_workspaces(f"cuda:{device}")
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device)[1]
        most = torch.cuda.memory_reserved(device) + mebibytes * 2**20
        torch.cuda.set_per_process_memory_fraction(most / total, device)
    try:
        yield
    finally:
        for device in devices:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu2
@pytest.mark.parametrize("memory", [None, 2**33])
def test_a_batch_that_no_device_can_hold(memory: int | None) -> None:
    """A batch of 128 MiB of activations trains on two limited devices, also if memory= promises more."""
    model = seeded(Wide)
    x = torch.randn(256, 2**13)
    alone = copy.deepcopy(model)
    loss_of(alone(x)).backward()
    backend = BalancedBackend(devices=("cuda:0", "cuda:1"), memory=memory, optimizer_state=0.0)
    with limited(112):
        before = {name: torch.cuda.memory_allocated(name) for name in ("cuda:0", "cuda:1")}
        with parallel_model(model, backend=backend):
            loss_of(model(x)).backward()
            made = plan(model)
            assert made.is_split
            for device in range(2):
                torch.cuda.reset_peak_memory_stats(device)
            model.zero_grad()
            loss_of(model(x)).backward()
            for name, predicted in zip(made.devices, made.memory_bytes, strict=True):
                assert torch.cuda.max_memory_allocated(name) - before[name] < 1.5 * predicted
    assert_equal_gradients(model, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu2
@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_a_step_that_runs_out_of_memory(what: str) -> None:
    """An error in forward, backward or an optimizer step names the device, the predicted bytes, and options."""
    model = seeded(Wide)
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU [01] (.|\n)*bytes: \d+ on cuda:0, \d+(.|\n)*memory="):
        run_without_memory(model, what)
    assert {each.device for each in model.parameters()} == {torch.device("cpu")}


def run_without_memory(model: nn.Module, what: str) -> None:
    x = torch.randn(64, 2**13, device="cuda:0")
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with parallel_model(model, backend=BalancedBackend(devices=("cuda:1", "cuda:0"), microbatches=4)):
        loss = loss_of(model(x[:8]))
        if what == "step":
            loss.backward()
        with limited(0.06):
            filling = [*rest_of("cuda:0"), *rest_of("cuda:1")]
            {"forward": lambda: model(x), "backward": loss.backward, "step": optimizer.step}[what]()
            del filling


def rest_of(device: str) -> Iterator[torch.Tensor]:
    """Allocate all that a limited device has left, also in segments that the allocator has begun to use."""
    for size in (2**21, 2**19, 2**16, 2**9):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                yield torch.empty(size, dtype=torch.uint8, device=device)


def moving_average(model: nn.Module, average: nn.Module) -> None:
    for mine, one in zip(average.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(one.data, alpha=0.1)


def foreach_average(model: nn.Module, average: nn.Module) -> None:
    torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("use", "works"),
    [
        (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), True),
        (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True), True),
        (lambda model, average: AveragedModel(average).update_parameters(model), True),
        (lambda model, average: average.load_state_dict(model.state_dict()), True),
        (moving_average, False),
        (foreach_average, False),
        (lambda model, _: nn.utils.parameters_to_vector(model.parameters()), False),
        (lambda model, _: torch.stack([each.grad.norm() for each in model.parameters()]), False),
    ],
)
def test_walking_the_parameters_of_two_devices(use: Any, works: bool) -> None:
    """Clipping, averaged models and state dicts work; an operation on parameters of two devices is refused by name."""
    model, x = seeded(Wide).cuda(), torch.randn(8, 2**13, device="cuda:0")
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    names = contextlib.nullcontext() if works else pytest.raises(ConfigError, match="has moved the model's parameters")
    with names, parallel_model(model, backend=BalancedBackend(devices=("cuda:1", "cuda:0"), microbatches=4)):
        loss_of(model(x)).backward()
        assert len({each.device for each in model.parameters()}) == 2
        use(model, average)
    assert {each.device for each in model.parameters()} == {torch.device("cuda:0")}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(1000, 128), nn.Linear(128, 1000)
        self.first, self.second = nn.LSTM(128, 128, batch_first=True), nn.LSTM(128, 128, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.tokens(tokens))[0])[0])


def linear() -> nn.Module:
    return nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(512, 512), nn.ReLU())))


def convolutional() -> nn.Module:
    widths = (3, *(16,) * 6)
    blocks = ((nn.Conv2d(i, j, 3, padding=1), nn.BatchNorm2d(j), nn.ReLU()) for i, j in itertools.pairwise(widths))
    return nn.Sequential(*(each for block in blocks for each in block), nn.AdaptiveAvgPool2d(4), nn.Flatten())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("make", "shape", "amp"),
    [
        (linear, (512, 512), False),
        (linear, (2048, 512), "bf16"),
        (linear, (64, 512), False),
        (linear, (64, 512), "bf16"),
        (convolutional, (32, 3, 32, 32), False),
        (convolutional, (32, 3, 32, 32), "bf16"),
        (encoder, (16, 64, 64), False),
        (encoder, (16, 64, 64), "bf16"),
        (Recurrent, (32, 32), False),
    ],
)
@pytest.mark.usefixtures("equal_times")
def test_the_predicted_peak_of_each_device(make: Any, shape: tuple[int, ...], amp: Any) -> None:
    """A step with Adam and a loss outside of the model needs the predicted bytes, within 25 % or 2 MiB."""
    x = torch.randint(1000, shape, device="cuda:0") if make is Recurrent else torch.randn(shape, device="cuda:0")
    assert_predicted_peak(make, lambda model: model(x).square().mean(), amp=amp)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("name", "microbatches", "amp"), [("Llama", 8, False), ("GPT2", 4, False), ("GPT2", 4, "bf16")]
)
@pytest.mark.usefixtures("equal_times")
def test_the_predicted_peak_beside_logits(name: str, microbatches: int, amp: Any) -> None:
    """A step of a language model that computes its loss needs the predicted bytes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 4000, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
    if name == "Llama":
        sizes["intermediate_size"] = 128
    config = getattr(transformers, f"{name}Config")(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    make = getattr(transformers, "LlamaForCausalLM" if name == "Llama" else "GPT2LMHeadModel")
    tokens = torch.randint(4000, (32, 64), device="cuda:0")
    kept = {}  # the output, as in a loop that has a variable for it, until the forward of the next step

    def step(model: Any) -> torch.Tensor:
        kept.clear()
        kept.update(model(input_ids=tokens, labels=tokens))
        return kept["loss"]

    assert_predicted_peak(lambda: make(config), step, microbatches=microbatches, amp=amp)


@pytest.fixture
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything that is measured take one second, so that the plan is the same on a busy machine."""
    for name in ("elapsed_s", "shortest"):
        monkeypatch.setattr(profiling, name, lambda *_: 1.0)


def assert_predicted_peak(make: Any, step: Any, *, microbatches: int = 4, amp: Any = None, **options: Any) -> None:
    take_workspaces("cuda:0", "cuda:1")
    model = seeded(make).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    backend = BalancedBackend(devices=("cuda:0", "cuda:1"), microbatches=microbatches, **options)
    with parallel_model(model, backend=backend, amp=amp):
        gc.collect()
        before = [torch.cuda.memory_allocated(device) for device in range(2)]
        before[0] -= sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        for _ in range(4):
            for device in range(2):
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            optimizer.zero_grad()
            step(model).backward()
            optimizer.step()
        made = plan(model)
        names = ("cuda:0", "cuda:1")
        peaks = {name: torch.cuda.max_memory_allocated(name) - used for name, used in zip(names, before, strict=True)}
    assert dict(zip(made.devices, made.memory_bytes, strict=True)) == pytest.approx(peaks, rel=0.25, abs=2**21)


TWO_GPUS = ("cuda:0", "cuda:1")


@pytest.mark.gpu2
@pytest.mark.parametrize("make", ["LBFGS", "fused Adam"])
def test_the_state_of_an_optimizer_follows_in_containers_and_as_numbers(make: str) -> None:
    """Lists of tensors, and numbers on a GPU, move with their parameters, into the block and out of it."""
    model, x = seeded(Chain).to("cuda:0"), torch.randn(8, 8, device="cuda:0")
    parameters = list(model.c.parameters())
    if make == "LBFGS":
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(parameters, max_iter=3)
    else:
        optimizer = torch.optim.Adam(parameters, fused=True)

    def loss() -> Any:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    plain = copy.deepcopy(model)
    optimizer.step(loss)
    with pipelined(model, ((x,), {}), devices=TWO_GPUS):
        # The first batch moves the parameters, and a step their state before it calls `loss`.
        model(x)
        optimizer.step(loss)
        assert model.c.weight.device == torch.device("cuda:1")
    optimizer.step(loss)
    assert not torch.equal(model.c.weight, plain.c.weight)


class InputGradient(nn.Module):
    """Asks for the gradient of an input that its modules have seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        y = self.a(x) + self.b(x).to(x.device)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(self.b(x).square().sum(), x, create_graph=True)
        return y + gradient.to(y.device)


@pytest.mark.gpu2
@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_input_that_requires_grad_from_the_middle_of_forward_on(microbatches: int) -> None:
    """Its copy on another device has the gradient, and is not the copy from before."""
    model, x = seeded(InputGradient).to("cuda:0"), torch.randn(8, 8, device="cuda:0")
    expected = copy.deepcopy(model)(x)
    with pipelined(model, ((x,), {}), devices=TWO_GPUS, microbatches=microbatches):
        torch.testing.assert_close(model(x), expected)
