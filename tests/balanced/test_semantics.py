"""Semantics that users rely on besides numbers: hooks, modes, RNG, errors, memory, copies."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import pickle
import threading
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch
from balanced.models import (
    CASES,
    Gpt,
    ResNet,
    assert_equal_gradients,
    batch_of,
    gradients,
    images,
    loss_of,
    pipelined,
    plan_for,
    rows,
    seeded,
    tokens,
)
from torch import nn
from torch.nn import functional as F

from parallelize import parallel_model
from parallelize.backends.balanced.microbatch_run import active_run
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend

INPUTS = batch_of(CASES["gpt, tied"])
X = INPUTS[0][0]


def test_hooks_run_once_with_the_full_gradient() -> None:
    """Tensor hooks and post-accumulate hooks of every parameter, also tied ones, run once per backward."""
    model = seeded(Gpt)
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _g, n=name: fired.update({n: fired.get(n, 0) + 1}))
        parameter.register_post_accumulate_grad_hook(
            lambda _p, n=name: fired.update({f"{n}!": fired.get(f"{n}!", 0) + 1})
        )
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pipelined(model, INPUTS):
        loss_of(model(X)).backward()
    assert set(fired.values()) == {1}
    assert len(fired) == 2 * len(list(model.parameters()))
    # Once in `call_order`, once here.
    assert len(calls) == 2


def test_autograd_grad_does_not_modify_grad() -> None:
    """torch.autograd.grad returns the plain model's gradients, also for some parameters, and sets no .grad."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS):
        got = torch.autograd.grad(loss_of(model(X)), list(model.parameters()))
        few = torch.autograd.grad(loss_of(model(X)), [model.norm.weight])
    want = torch.autograd.grad(loss_of(plain(X)), list(plain.parameters()))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(few[0], dict(zip(dict(model.named_parameters()), got, strict=True))["norm.weight"])
    assert all(gradient is None for gradient in gradients(model).values())


def test_two_forwards_and_one_backward() -> None:
    """The gradients of a sum of two forwards are added."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS):
        (loss_of(model(X)) + 0.3 * loss_of(model(X.flip(0)))).backward()
    (loss_of(plain(X)) + 0.3 * loss_of(plain(X.flip(0)))).backward()
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)


def test_no_grad_inference_and_evaluation() -> None:
    """Outputs equal the plain model's in no_grad and inference mode, and require no grad."""
    model = seeded(lambda: Gpt(dropout=0.5)).eval()
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output = model(X)
                torch.testing.assert_close(output, plain(X))
            assert not output.requires_grad
        assert model(X).requires_grad


def test_dropout_depends_on_the_seed_only() -> None:
    """Runs with one seed are bitwise equal for any thread timing; another seed, and each sample, differ."""
    model = seeded(lambda: Gpt(dropout=0.5))
    first = model.blocks[0].mlp[0]
    with pipelined(model, INPUTS):
        found = []
        for delay in (0.0, 0.002, 0.0, 0.004):
            handle = first.register_forward_pre_hook(lambda *_, d=delay: time.sleep(d))
            torch.manual_seed(3)
            model.zero_grad()
            output = model(X)
            loss_of(output).backward()
            found.append((output.detach(), gradients(model)["tokens.weight"].clone()))
            handle.remove()
        torch.manual_seed(4)
        other = model(X)
        alike = model(X[:1].repeat(8, 1))
    for output, gradient in found[1:]:
        assert torch.equal(output, found[0][0])
        assert torch.equal(gradient, found[0][1])
    assert not torch.equal(other, found[0][0])
    assert not torch.equal(alike[0], alike[2])


def test_random_operators_without_a_generator_argument_are_seeded_too() -> None:
    """torch.rand, rand_like and randn inside forward depend on the seed, as does what is drawn afterwards."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x) * torch.rand(8) + torch.rand_like(x)
            return self.b(x) + torch.randn(x.shape, device=x.device)

    model = Noisy()
    with pipelined(model, rows(8)):
        x = torch.randn(8, 8)
        found, after = [], []
        for _ in range(3):
            torch.manual_seed(5)
            found.append(model(x))
            after.append(torch.rand(()))
    assert all(torch.equal(output, found[0]) for output in found)
    assert after[0] == after[1] == after[2]


def test_recomputation_changes_nothing() -> None:
    """Gradients with recomputed activations are bitwise equal, with dropout and batch norm."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    model = seeded(Mixed)
    other = copy.deepcopy(model)
    inputs = rows(8)
    for each, recompute in ((model, False), (other, True)):
        with pipelined(each, inputs, recompute=recompute):
            torch.manual_seed(0)
            loss_of(each(*inputs[0])).backward()
        assert "forward" not in each.body[0].__dict__
    assert_equal_gradients(other, model, rtol=0, atol=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_recomputation_saves_less() -> None:
    """Between forward and backward, autograd saves only the units' inputs."""

    def kept(*, recompute: bool) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)) for _ in range(4)))
        plan: dict[str, Any] = {"events": ("0", "1", "2", "3"), "bounds": (0, 2, 4), "recompute": recompute}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with pipelined(model, rows(8), **plan), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(torch.randn(64, 8))
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        del output
        return sum(size for pointer, size in sizes.items() if pointer not in own)

    assert kept(recompute=True) < kept(recompute=False) / 4


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_tracks_the_full_batch(momentum: float | None) -> None:
    """The first batch norm's running statistics equal the plain model's, for uneven batches too; a step counts once."""
    model = seeded(ResNet)
    model.norm.momentum = momentum
    plain = copy.deepcopy(model)
    x = images(11)[0][0]
    with pipelined(model, images(8)):
        for batch in (x, x[:8] + 1.0):
            model(batch)
            plain(batch)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)
    assert all(module.num_batches_tracked == 2 for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_full_batch_norm_is_the_plain_model() -> None:
    """With batch_norm="full", outputs, gradients and statistics are the plain model's."""
    model = seeded(ResNet)
    plain = copy.deepcopy(model)
    x = images(8)[0][0]
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), batch_norm="full")):
        output = model(x)
        loss_of(output).backward()
    expected = plain(x)
    loss_of(expected).backward()
    torch.testing.assert_close(output, expected)
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.layers[2].norm2.running_var, plain.layers[2].norm2.running_var)


def test_autocast_of_the_caller_applies_on_every_stage() -> None:
    """Under torch.autocast outputs are bfloat16 and equal the plain model's on micro-batches, gradients are float32."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS), torch.autocast("cpu", torch.bfloat16):
        output = model(X)
        expected = torch.cat([plain(part) for part in X.chunk(4)])
        loss = F.cross_entropy(output.float().flatten(0, 1), X.flatten())
        loss.backward()
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, expected)
    assert all(gradient is not None and gradient.dtype is torch.float32 for gradient in gradients(model).values())


class Seen(nn.Linear):
    """Records the dtype of its weight, as forward reads it and as an operation receives it."""

    found: ClassVar[set[tuple[torch.dtype, torch.dtype]]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.add((self.weight.dtype, (self.weight + 0).dtype))
        return super().forward(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_half_weights_over_full_ones(recompute: bool) -> None:
    """O2: modules except batch norm compute with half weights; gradients equal those of micro-batches on one device."""
    model = seeded(lambda: nn.Sequential(Seen(8, 8), nn.BatchNorm1d(8), nn.ReLU(), Seen(8, 8), nn.Linear(8, 3)))
    plain, x = copy.deepcopy(model), torch.randn(8, 8)
    plan = plan_for(model, ((x,), {}), recompute=recompute)
    Seen.found.clear()
    with parallel_model(model, backend=BalancedBackend(devices=plan.devices, plan=plan), amp="O2"):
        model(x).float().square().sum().backward()
    with parallel_model(plain, amp="O2"):
        for part in x.chunk(4):
            plain(part).float().square().sum().backward()
    assert Seen.found == {(torch.bfloat16, torch.bfloat16)}
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_mixed_precision_of_the_block(level: str) -> None:
    """amp= computes in bfloat16 on all stages, returns fp32, and a step gives the same weights as on one stage."""
    weights = []
    for stages in (1, 2):
        model = seeded(lambda: Gpt(tied=False))
        backend = BalancedBackend(devices=("cpu",) * stages, microbatches=4)
        with parallel_model(model, backend=backend, amp=level):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            output = model(X)
            assert output.dtype is torch.float32
            F.cross_entropy(output.flatten(0, 1), X.flatten()).backward()
            optimizer.step()
        weights.append(list(model.parameters()))
    for one, two in zip(*weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.fails_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x))
        if (x > 50).any():
            raise ValueError("a bad sample")
        if self.fails_backward:
            h.register_hook(self.fail)
        return self.c(h)

    def fail(self, _gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in backward")


def test_an_exception_in_a_stage_reaches_the_caller() -> None:
    """Errors of forward and backward are raised unchanged, nothing hangs, the next step has the right gradients."""
    model = seeded(Fragile)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    bad = x.clone()
    bad[5, 0] = 99
    with pipelined(model, rows(8)):
        with pytest.raises(ValueError, match="a bad sample"):
            model(bad)
        model.fails_backward = True
        with pytest.raises(ZeroDivisionError, match="in backward"):
            loss_of(model(x)).backward()
        model.fails_backward = False
        model.zero_grad()
        loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    assert_equal_gradients(model, plain)


def test_an_interrupt_ends_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the caller waits ends all micro-batches before it is raised, and the next step works."""
    model = seeded(Fragile)
    inside: list[int] = []
    with pipelined(model, rows(8)):
        handle = model.a.register_forward_hook(lambda *_: inside.append(threading.get_ident()))
        wait, interrupted = concurrent.futures.wait, []

        def interrupt(futures: Any, **more: Any) -> Any:
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return wait(futures, **more)

        monkeypatch.setattr("concurrent.futures.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(8, 8))
        before = len(inside)
        handle.remove()
        loss_of(model(torch.randn(8, 8))).backward()
        assert len(inside) == before
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_step_leaves_no_cycle_behind(dropout: float) -> None:
    """A forward's graph and activations are freed with its output, with or without backward, without the collector."""
    model = seeded(lambda: Gpt(dropout=dropout))
    activations: list[weakref.ref[torch.Tensor]] = []
    model.norm.register_forward_hook(lambda _m, _a, output: activations.append(weakref.ref(output)))
    with pipelined(model, INPUTS, recompute=True):
        model(X)
        gc.collect()
        gc.disable()
        try:
            for is_used in (True, False):
                activations.clear()
                output = model(X)
                if is_used:
                    loss_of(output).backward()
                del output
                # A thread of the pool drops its last call just after the caller has got the result.
                while any(each() is not None for each in activations):
                    time.sleep(0.01)  # until the test's time limit
        finally:
            gc.enable()


def test_an_output_may_be_changed_in_place() -> None:
    """The user's loop may scale or mask the model's output, also with one micro-batch."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS):
        for x in (X, X[:1]):
            output = model(x)
            output.mul_(2.0)
            loss_of(output).backward()
    for x in (X, X[:1]):
        loss_of(plain(x).mul_(2.0)).backward()
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)


def test_the_model_object_stays_unchanged() -> None:
    """Same object and state_dict keys inside; copies and pickles made inside are plain models; no attribute remains."""
    model = seeded(Gpt)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys, parameters = list(model.state_dict()), list(model.parameters())
    threads = threading.active_count()
    with pipelined(model, INPUTS) as same:
        loss_of(model(X)).backward()
        copied = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        assert same is model
        assert list(model.state_dict()) == keys
    for other in (copied, loaded):
        torch.testing.assert_close(other(X), model(X))
        assert b"parallelize" not in pickle.dumps(other)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.tokens.weight.__dict__ == {}
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())
    assert threading.active_count() == threads


def test_thread_local_state_is_the_callers() -> None:
    """Thread-local modes, contexts and defaults of torch are the caller's inside every micro-batch."""
    seen: list[Any] = []

    def state() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
            torch.get_default_dtype(),
            torch.get_default_device(),
        )

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if active_run() is not None:
                seen.append(state())
            return self.b(self.a(x))

    x = torch.randn(8, 8)
    with pipelined(Looking(), rows(8)) as model:
        for context in (
            torch.no_grad(),
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            torch.autograd.graph.save_on_cpu(),
            torch.device("meta"),
        ):
            with context:
                model(x)  # is validated
                seen.clear()
                model(x)
                expected = state()
            assert seen == [expected] * 4


def test_two_pipelined_models_in_one_loop() -> None:
    """A generator and a discriminator, both pipelined, are trained through each other like plain ones."""
    models = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2)]
    plain = copy.deepcopy(models)
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
    z = torch.randn(8, 8)
    with parallel_model(*models, backend=backend) as (generator, critic):
        loss_of(critic(generator(z))).backward()
        loss_of(critic(generator(z).detach())).backward()
    loss_of(plain[1](plain[0](z))).backward()
    loss_of(plain[1](plain[0](z).detach())).backward()
    for one, other in zip(models, plain, strict=True):
        assert_equal_gradients(one, other, rtol=1e-4, atol=1e-5)


def test_a_first_batch_in_inference_mode() -> None:
    """Planning on a batch without gradients prepares for training too."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=4)):
        with torch.inference_mode():
            torch.testing.assert_close(model(X + 0), plain(X), rtol=1e-4, atol=1e-5)
        loss_of(model(X)).backward()
    loss_of(plain(X)).backward()
    assert_equal_gradients(model, plain, rtol=1e-4, atol=1e-4)


def test_a_model_that_calls_itself() -> None:
    """A forward that calls the model again stays inside its micro-batch."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, *, again: bool = True) -> torch.Tensor:
            y = self.b(self.a(x))
            return self(y, again=False) if again else y

    model = seeded(Twice)
    plain = copy.deepcopy(model)
    inputs = rows(8)
    with pipelined(model, inputs):
        loss_of(model(*inputs[0])).backward()
    loss_of(plain(*inputs[0])).backward()
    assert_equal_gradients(model, plain)


def test_tokens_of_another_length() -> None:
    """Batches of other shapes than the first run through the same stages."""
    model = seeded(Gpt)
    plain = copy.deepcopy(model)
    with pipelined(model, INPUTS):
        for length in (3, 8, 5):
            x = tokens(6)[0][0][:, :length]
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b):
            x = x + (layer(x) @ x.transpose(1, 2) + bias).softmax(-1) @ x
        return x


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_later_batch_may_be_as_long_as_an_argument_that_is_not_per_sample(is_loaded: bool) -> None:
    """A bias over 4 tokens is not split for a batch of 4, after a batch of another length or with a loaded plan."""
    model = seeded(Attending)
    plain = copy.deepcopy(model)
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
    first, *later = [(torch.randn(4, t, 8), torch.randn(t, t) * 3) for t in (6, 4, 5, 4)]
    if is_loaded:
        with parallel_model(seeded(Attending), backend=backend) as other:
            other(*first)
            assert plan(other).whole_inputs == ("1 (2-D)",)
            backend = BalancedBackend(devices=("cpu", "cpu"), plan=plan(other))
        first, *later = later
    with parallel_model(model, backend=backend):
        for inputs in (first, *later):
            torch.testing.assert_close(model(*inputs), plain(*inputs))


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.b(self.a(x))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.b(self.a(x))
        return (y.t(), y.square().mean()) if self.training else y


def test_outputs_may_differ_between_training_and_evaluation() -> None:
    """Outputs of another structure, with or without labels, in training or evaluation, are joined."""
    labelled, transposing = seeded(Labelled), seeded(Transposing)
    x, labels = torch.randn(8, 8), torch.randint(5, (8,))
    backend = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)
    with parallel_model(copy.deepcopy(labelled), backend=backend) as model:
        assert model(x, labels)["logits"].shape == (8, 5)
        torch.testing.assert_close(model.eval()(x)["logits"], labelled(x)["logits"])
    with parallel_model(copy.deepcopy(transposing), backend=backend) as model:
        torch.testing.assert_close(model(x), transposing(x))
        torch.testing.assert_close(model.eval()(x), transposing.eval()(x))


def test_a_last_batch_with_batch_norm_may_be_small() -> None:
    """With training batch norm, a batch smaller than planned is split into fewer parts, of at least two samples."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    inputs = rows(16)
    with pipelined(model, inputs, samples=16) as same:
        same(*inputs[0])
        norm = copy.deepcopy(model[1])
        x = torch.randn(5, 8)
        parts = torch.cat([model[2](norm(model[0](part))) for part in x.split((3, 2))])
        torch.testing.assert_close(same(x), parts)


class Pairing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.b(self.a(x)).view(8, 5).chunk(2)
        return F.mse_loss(one, other)


def test_one_micro_batch_is_the_full_batch_while_planning_too() -> None:
    """With microbatches=1 or batch_norm="full", planning never runs the model on a part of a batch."""
    model, x = seeded(Pairing), torch.randn(8, 8)
    with parallel_model(copy.deepcopy(model), backend=BalancedBackend(devices=("cpu", "cpu"), microbatches=1)) as same:
        torch.testing.assert_close(same(x), model(x))
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    pair = torch.randn(2, 8)
    backend = BalancedBackend(devices=("cpu", "cpu"), batch_norm="full")
    with parallel_model(copy.deepcopy(norm), backend=backend) as same:
        torch.testing.assert_close(same(pair), norm(pair))
