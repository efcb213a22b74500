"""Batches that cannot be split are run whole, with one warning; what cannot run at all is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from balanced.models import (
    CASES,
    Chain,
    Gpt,
    assert_equal_gradients,
    batch_of,
    not_split_once,
    pipelined,
    plan_for,
    rows,
    seeded,
)
from torch import nn

from parallelize import ConfigError, parallel_model
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend
from parallelize.run.containers import leaves

INPUTS = batch_of(CASES["gpt, tied"])
X = INPUTS[0][0]
TWO = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)


def call(model: nn.Module, *args: Any, backend: BalancedBackend = TWO, **kwargs: Any) -> Any:
    with parallel_model(model, backend=backend):
        return model(*args, **kwargs)


def test_state_that_only_training_leaves() -> None:
    """A first batch in evaluation mode does not hide state that forward leaves on the model in training."""

    class Storing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            if self.training:
                self.hidden = hidden
            return self.c(self.b(hidden))

    model = Storing().eval()
    x = torch.randn(8, 8)
    with parallel_model(model, backend=TWO):
        assert model(x).shape == (8, 8)
        model.train()
        with not_split_once("forward changes hidden of the model"):
            model(x)
        assert model.hidden.shape == (8, 8)
        model.eval()
        assert model(x).shape == (8, 8)


def test_a_frozen_model_with_a_loss() -> None:
    """Without a graph, the number of targets of a loss is not known: such batches are not split."""

    class Scoring(Chain):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.c(self.b(self.a(x))), targets)

    model, x, targets = Scoring().requires_grad_(requires_grad=False), torch.randn(8, 8), torch.arange(8)
    plain = copy.deepcopy(model)
    with pipelined(model, ((x, targets), {})), not_split_once("the number of targets"):
        for first in range(0, 8, 3):
            some = targets.where(targets >= first, -100)
            torch.testing.assert_close(model(x, some), plain(x, some))


def test_samples_in_a_list() -> None:
    """Their tensors are split like others: a failure that the full batch does not have is explained by the split."""

    class Detecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
            return self.b(self.a(torch.stack(images)))

    images = [torch.randn(3, 8, 8) for _ in range(8)]
    with parallel_model(Detecting(), backend=TWO) as model:
        assert model(images).shape == (8, 4, 4, 4)
        assert "the first batch runs whole" in plan(model).why
    with pytest.raises(RuntimeError, match="expected input"):
        call(Detecting(), [torch.randn(5, 8, 8) for _ in range(8)])


@pytest.mark.parametrize(
    ("returned", "because"),
    [
        (lambda y: y.sum(0), r"a tensor of \(8,\), cannot be joined"),
        (lambda y: [y, y] if len(y) > 2 else [y], "forward fails|cannot be joined"),
        (lambda y: (y, Memory()), "output 1 of the model, a Memory, cannot be joined(.|\n)*use_cache = False"),
        (lambda y: (y, len(y)), "output 1 of the model, a int, cannot be joined"),
        (lambda y: (y, y.to_sparse()), "output 1 of the model, a Tensor, cannot be joined"),
        (
            lambda y: (y, torch.nested.as_nested_tensor(list(y), layout=torch.jagged)),
            "output 1 of the model, a NestedTensor, cannot be joined",
        ),
    ],
    ids=["a sum", "another structure", "an object", "a count", "a sparse tensor", "a nested tensor"],
)
def test_outputs_that_cannot_be_joined(returned: Any, because: str) -> None:
    """Such batches are not split; a warning names the output."""

    class Returning(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            return returned(self.c(self.b(self.a(x))))

    model, x = Returning(), torch.randn(8, 8)
    expected = leaves(copy.deepcopy(model)(x))
    with pipelined(model, rows(8)), not_split_once(because):
        for _ in range(2):
            found = leaves(model(x))
            torch.testing.assert_close(found[0], expected[0])
            assert len(found) == len(expected)


def test_no_batch() -> None:
    """Inputs without a tensor of enough dimensions are not split."""
    with pipelined(seeded(lambda: nn.Sequential(nn.PReLU(), nn.PReLU())), rows(8)) as model:
        for _ in range(2):
            with not_split_once("no argument of the model has a dimension 0" if not _ else None):
                model(torch.tensor(3.0))


class Memory:
    def __init__(self, **attributes: Any) -> None:
        self.kept: list[torch.Tensor] = []
        vars(self).update(attributes)


class Remembering(Chain):
    def forward(self, x: torch.Tensor, memory: Memory | None = None, *, scale: Any = None) -> torch.Tensor:
        h = self.a(x)
        if memory is not None:
            memory.kept.append(h.detach())
            h = h + memory.kept[0].mean()
        return self.c(self.b(h)) * (1.0 if scale is None else scale.by)


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_object_that_forward_modifies(is_planned: bool) -> None:
    """Its batch is not split, with one warning, and planning does not modify it."""
    model, x = Remembering(), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=TWO):
        if is_planned:
            model(x)
        # As the first batch, it makes the plan: the model is not split.
        with not_split_once("an argument of the model is a Memory" if is_planned else None):
            for _ in range(2):
                memory = Memory()
                torch.testing.assert_close(model(x, memory=memory), plain(x, memory=Memory()))
                assert [kept.shape for kept in memory.kept] == [(8, 8)]
        memory = Memory()
        with torch.no_grad():
            torch.testing.assert_close(model(x, memory=memory), plain(x, memory=Memory()))
        assert [kept.shape for kept in memory.kept] == [(8, 8)]


@pytest.mark.parametrize("kind", ["DataParallel", "SyncBatchNorm", "RecursiveScriptModule"])
def test_modules_that_are_parallel_or_scripted_themselves(kind: str) -> None:
    """They are refused at the start of the block, by name and class."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "DataParallel":
        model[1] = nn.DataParallel(model[1])
    elif kind == "SyncBatchNorm":
        model[1] = nn.SyncBatchNorm(8)
    else:
        with pytest.warns(Warning, match="torch.jit"):
            model[1] = torch.jit.script(model[1])
    with pytest.raises(ConfigError, match=f"1 is a {kind}"), parallel_model(model, backend=TWO):
        pass


def test_compiled_models() -> None:
    """A model that is compiled as a whole is refused: the calls of its submodules cannot be followed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match="the model is compiled"), parallel_model(model, backend=TWO):
        pass
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(ConfigError, match="the model is compiled"), parallel_model(model, backend=TWO):
        pass


def test_a_model_that_fits_nowhere() -> None:
    """Limits below the parameters, and below the activations, report the smallest sufficient limit."""
    model = seeded(Gpt)
    cap = 40_000
    for _ in range(2):
        with pytest.raises(ConfigError, match="the best split needs at least") as caught:
            call(model, X, backend=BalancedBackend(devices=("cpu", "cpu"), memory=cap, microbatches=8))
        cap = int(str(caught.value).split("(")[1].split(" bytes")[0]) + 1
    enough = BalancedBackend(devices=("cpu", "cpu"), memory=cap, microbatches=8)
    assert call(model, X, backend=enough).shape == (8, 8, 11)


class Generator(nn.Module):
    """Returns images, and the latents from which they are computed, as StyleGAN2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Linear(8, 8)
        self.synthesis = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = torch.tanh(self.mapping(z))
        return self.synthesis(latents), latents


def path_length(model: Any, z: torch.Tensor) -> torch.Tensor:
    images, latents = model(z)
    (gradient,) = torch.autograd.grad(images.square().sum(), latents, create_graph=True)
    return gradient.square().sum(1).sqrt().mean()


def test_a_gradient_by_a_joined_output() -> None:
    """torch.autograd.grad of one output by another one is refused by name; batches that run whole have it."""
    model, z = seeded(Generator), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    message = r"by an output of the model(.|\n)*joined(.|\n)*compute this gradient in forward"
    with pytest.raises(ConfigError, match=message), pipelined(model, ((z,), {})):
        path_length(model, z)
    with pipelined(model, ((z,), {}), microbatches=1):
        path_length(model, z).backward()
    path_length(plain, z).backward()
    assert_equal_gradients(model, plain)


def test_a_gradient_by_an_unused_tensor() -> None:
    """Where outputs of micro-batches are not the reason, torch's error is raised as it is."""
    model, x = seeded(Chain), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="not have been used in the graph") as caught, pipelined(model, rows(8)):
        torch.autograd.grad(model(x).sum(), torch.ones(3, requires_grad=True))
    assert not isinstance(caught.value, ConfigError)


def test_invalid_options() -> None:
    """All invalid options of the backend are in one error."""
    wrong: dict[str, Any] = {
        "microbatches": 0,
        "devices_per_process": 0,
    }
    with pytest.raises(ConfigError) as caught:
        BalancedBackend(**wrong)
    assert len(caught.value.faults) == 2


def test_a_plan_for_another_model() -> None:
    """A plan is checked against the model before use."""
    made = plan_for(seeded(Gpt), INPUTS)
    with pytest.raises(ConfigError, match="plan= is for another Gpt"):
        call(Chain(), X, backend=BalancedBackend(devices=("cpu", "cpu"), plan=made))


def test_a_model_without_a_plan() -> None:
    """plan() of a model that has not run explains how to get a plan."""
    with pytest.raises(ConfigError, match="run one batch first"):
        plan(seeded(Gpt))
