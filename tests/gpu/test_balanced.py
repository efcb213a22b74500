"""Pipelines with a GPU in them: every copy between devices, and the rule that no GPU node of autograd waits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from balanced.models import (
    CASES,
    Gpt,
    assert_equal_gradients,
    batch_of,
    divided,
    gradients,
    loss_of,
    plan_for,
    seeded,
    tensors,
)

from parallelize import parallel_model
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.runtime.containers import map_leaves

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PAIRS = [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")]


def to_gpu(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize("devices", PAIRS, ids="+".join)
@pytest.mark.parametrize(
    "name", ["cnn", "resnet", "unet", "gpt, tied", "gpt, loss inside", "lstm", "experts", "in place"]
)
def test_outputs_and_gradients_are_those_of_one_stage(name: str, devices: tuple[str, str]) -> None:
    """Over a GPU twice, and over CPU and GPU, outputs and gradients are those of one stage but for rounding."""
    case = CASES[name]
    inputs, model = to_gpu(batch_of(case)), seeded(case.make).cuda()
    alone = copy.deepcopy(model)
    found = []
    for each, places in ((model, devices), (alone, ("cuda:0",))):
        options: dict[str, Any] = {"stages": len(places), "devices": places, "output_dims": ((0, 0),)}
        made = plan_for(each, inputs, **options)
        with parallel_model(each, backend=BalancedBackend(devices=places, plan=made)):
            output = each(*inputs[0], **inputs[1])
            loss_of(output).backward()
            assert {leaf.device for leaf in tensors(output)} == {torch.device("cuda:0")}
        found.append(output)
    for got, want in zip(tensors(found[0]), tensors(found[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert {each.device for each in model.parameters()} == {torch.device("cuda:0")}
    assert_equal_gradients(model, alone, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("devices", PAIRS, ids="+".join)
def test_a_loop_with_an_optimizer_made_before(devices: tuple[str, str]) -> None:
    """Measured and divided, a model with AdamW state from before the block goes on training where its parts are."""
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


def test_dropout_on_a_gpu_depends_on_the_seed_alone() -> None:
    """Masks drawn on a GPU are bit for bit alike with one seed, and recomputed ones are those of the forward."""
    inputs = to_gpu(batch_of(CASES["gpt, tied"]))
    found = []
    for recompute in (False, True, True):
        model = seeded(lambda: Gpt(dropout=0.5)).cuda()
        with divided(model, inputs, device="cuda:0", draws=True, recompute=recompute):
            torch.manual_seed(0)
            output = model(*inputs[0])
            loss_of(output).backward()
        found.append((output.detach(), gradients(model)["blocks.0.qkv.weight"]))
    for output, gradient in found[1:]:
        assert torch.equal(output, found[0][0])
        torch.testing.assert_close(gradient, found[0][1])


def test_a_side_stream_is_the_pipelines_too() -> None:
    """Called on a stream of the user's, every stage computes there: outputs are right without a synchronisation."""
    inputs = to_gpu(batch_of(CASES["gpt, tied"]))
    model = seeded(Gpt).cuda()
    expected = model(*inputs[0])
    with divided(model, inputs, device="cuda:0"), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        output = model(*inputs[0]) * 1.0
        torch.cuda.current_stream().synchronize()
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_with_loss_scaling(dtype: str) -> None:
    """A divided model trains in half precision under an unchanged loop, loss scaling included."""
    model = seeded(Gpt).cuda()
    x = torch.randint(11, (8, 8), device="cuda:0")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    backend = BalancedBackend(devices=("cuda:0", "cuda:0"), microbatches=4)
    with parallel_model(model, backend=backend, amp=dtype):
        for _ in range(12):
            _, loss = model(x, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_memory_of_a_gpu_is_a_limit() -> None:
    """Without a limit of the user's, the plan keeps each stage within the GPU's free memory."""
    model = seeded(Gpt).cuda()
    free, _ = torch.cuda.mem_get_info(0)
    with parallel_model(model, backend=BalancedBackend(devices=("cuda:0", "cuda:0"), microbatches=2)):
        model(torch.randint(11, (8, 8), device="cuda:0"))
    assert sum(plan(model).memory_bytes) < free
