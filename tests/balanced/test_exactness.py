"""A pipelined model computes what the plain one does on the full batch; whole programs are in tests/one_word."""

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
    loss_of,
    pipelined,
    seeded,
    tensors,
    tokens,
)

from parallelize import parallel_model
from parallelize.backends.balanced.plugin import BalancedBackend


def run(model: Any, inputs: Any, **options: Any) -> Any:
    with pipelined(model, inputs, **options) as same:
        assert same is model
        output = model(*inputs[0], **inputs[1])
        loss_of(output).backward()
    return output


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_exact])
def test_micro_batches_equal_the_full_batch(name: str) -> None:
    """Outputs and gradients equal the plain model's on the full batch, up to rounding."""
    case = CASES[name]
    inputs, model = batch_of(case), seeded(case.make)
    plain = copy.deepcopy(model)
    output = run(model, inputs, stages=2, batch_dim=case.batch_dim)
    expected = plain(*inputs[0], **inputs[1])
    loss_of(expected).backward()
    for got, want in zip(tensors(output), tensors(expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 1), (3, 8), (4, 3)])
def test_any_number_of_stages_and_micro_batches(stages: int, microbatches: int) -> None:
    """Tied weights get the gradients of the plain model, for any number of stages and micro-batches."""
    inputs, model = batch_of(CASES["gpt, tied"]), seeded(Gpt)
    plain = copy.deepcopy(model)
    run(model, inputs, stages=stages, microbatches=microbatches)
    loss_of(plain(*inputs[0])).backward()
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("samples", [7, 5, 2, 1])
def test_any_size_of_batch(samples: int) -> None:
    """Batches that are smaller, or not a multiple of the micro-batches, give the plain model's gradients."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with pipelined(model, batch_of(CASES["gpt, tied"])):
        tokens_ = tokens(samples)[0][0]
        logits, loss = model(tokens_, tokens_)
        assert logits.shape == (samples, 8, 11)
        loss.backward()
    plain(tokens_, tokens_)[1].backward()
    assert_equal_gradients(model, plain)


def test_an_input_that_requires_grad() -> None:
    """Inputs get the plain model's gradients, both split ones and those that every micro-batch shares."""
    torch.manual_seed(0)

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x) * scale)) * scale + x

    model = Scaled()
    plain = copy.deepcopy(model)
    x, scale = torch.randn(7, 8, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    with pipelined(model, ((x.detach(),), {"scale": scale.detach()})):
        got = torch.autograd.grad(loss_of(model(x, scale=scale)), [x, scale, *model.parameters()])
    want = torch.autograd.grad(loss_of(plain(x, scale=scale)), [x, scale, *plain.parameters()])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_planned", [False, True])
def test_generate_gives_the_plain_models_text(is_planned: bool) -> None:
    """generate(), which passes a cache between calls, gives the plain model's text before and after training."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=2, vocab_size=60, n_positions=64, initializer_range=0.3, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    plain = copy.deepcopy(model).eval()
    tokens = torch.randint(5, 50, (8, 10))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        if is_planned:
            model(input_ids=tokens, use_cache=False).logits.sum().backward()
        model.eval()
        assert torch.equal(model.generate(tokens, **options), plain.generate(tokens, **options))
        model.train()
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
