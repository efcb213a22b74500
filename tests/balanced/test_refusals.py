"""Batches that cannot be split are run whole, with one warning; what cannot run at all is refused by name."""

from __future__ import annotations

import copy
import random
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from balanced.models import (
    CASES,
    Gpt,
    assert_equal_gradients,
    batch_of,
    loss_of,
    not_split_once,
    pipelined,
    plan_for,
    rows,
    seeded,
    tokens,
)
from torch import nn
from torch.distributed._composable import checkpoint

from parallelize import ConfigError, parallel_model
from parallelize.backends.balanced.plan import Plan, plan
from parallelize.backends.balanced.plugin import BalancedBackend

INPUTS = batch_of(CASES["gpt, tied"])
X = INPUTS[0][0]
TWO = BalancedBackend(devices=("cpu", "cpu"), microbatches=4)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


def assert_not_split(model: nn.Module, *args: Any, because: str, **kwargs: Any) -> None:
    """Run two steps of a model, and compare the outputs and gradients with those of a plain copy."""
    plain = copy.deepcopy(model)
    with parallel_model(model, backend=TWO), not_split_once(because):
        found = [model(*args, **kwargs) for _ in range(2)]
        loss_of(found[0]).backward()
    expected = [plain(*args, **kwargs) for _ in range(2)]
    loss_of(expected[0]).backward()
    torch.testing.assert_close(found, expected)
    assert_equal_gradients(model, plain)


def call(model: nn.Module, *args: Any, backend: BalancedBackend = TWO, **kwargs: Any) -> Any:
    with parallel_model(model, backend=backend):
        return model(*args, **kwargs)


def test_an_activation_stored_on_the_model() -> None:
    """Batches of a forward that stores a tensor on a module are not split; a warning names the attribute."""

    class Storing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.a(x)
            return self.c(self.b(self.hidden)) + self.hidden

    assert_not_split(Storing(), torch.randn(8, 8), because="forward changes hidden of the model")
    whole = BalancedBackend(devices=("cpu", "cpu"), microbatches=1)
    assert call(Storing(), torch.randn(8, 8), backend=whole).shape == (8, 8)


def test_a_buffer_that_forward_changes() -> None:
    """The model's own running statistics, unlike batch norm's, need the full batch; a warning names the buffer."""

    class Counting(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.detach().mean(0))
            return self.c(self.b(self.a(x)))

    model = Counting()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    with pipelined(model, ((x,), {})), not_split_once("forward changes seen of the model"):
        model.seen.zero_()  # `call_order` has run forward
        model(x)
    plain(x)
    torch.testing.assert_close(model.seen, plain.seen)


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


def test_a_cache_filled_once_is_allowed() -> None:
    """A cache that the first forward creates and later ones only read is allowed."""

    class Cached(Chain):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(8.0)
            return self.c(self.b(self.a(x) * self.table))

    assert call(Cached(), torch.randn(8, 8)).shape == (8, 8)


def test_samples_that_depend_on_each_other() -> None:
    """Batches of a model that normalizes over the batch are not split; a warning has the output's position."""

    class Mixing(Chain):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.b(self.a(x))
            return y, self.c(y).softmax(0)

    assert_not_split(Mixing(), torch.randn(8, 8), because="output 1 of the model, computed in micro-batches, differs")


def test_an_argument_as_long_as_the_batch_that_is_not_per_sample() -> None:
    """A table with as many rows as samples would be split by mistake: the wrong output is detected."""

    class Tabled(Chain):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x))) + table.mean(0)

    assert_not_split(Tabled(), torch.randn(8, 8), torch.randn(8, 8), because="output 0 of the model")


def test_a_number_that_switches_the_path() -> None:
    """A new number is validated, as a new mode is; a counter is not validated for ever."""

    class Deep(Chain):
        def forward(self, x: torch.Tensor, layers: int = 2) -> torch.Tensor:
            return self.c(self.b(self.a(x))).softmax(0 if layers == 3 else -1)

    model, x, calls = Deep(), torch.randn(8, 8), []
    plain = copy.deepcopy(model)
    with pipelined(model, ((x,), {})):
        with not_split_once(None):
            torch.testing.assert_close(model(x, layers=2), plain(x, layers=2))
        with not_split_once("output 0 of the model, computed in micro-batches, differs"):
            torch.testing.assert_close(model(x, layers=3), plain(x, layers=3))
        model.a.register_forward_pre_hook(lambda *_: calls.append(1))
        for step in range(10, 30):
            calls.clear()
            model(x, layers=step)
    assert len(calls) == 4


def test_a_text_that_switches_the_path() -> None:
    """A new text is validated, as a new mode is; after eight, others are validated once, with one warning."""

    class Moded(Chain):
        def forward(self, x: torch.Tensor, mode: str = "train") -> torch.Tensor:
            return self.c(self.b(self.a(x))).softmax(0 if mode == "global" else -1)

    model, x, calls = Moded(), torch.randn(8, 8), []
    plain = copy.deepcopy(model)
    with pipelined(model, ((x,), {})):
        with not_split_once("output 0 of the model, computed in micro-batches, differs"):
            torch.testing.assert_close(model(x, mode="global"), plain(x, mode="global"))
        model.a.register_forward_pre_hook(lambda *_: calls.append(1))

        def validated(step: int) -> bool:
            calls.clear()
            model(x, mode=f"caption {step}")
            return len(calls) > 4

        assert all(validated(step) for step in range(7))
        with pytest.warns(UserWarning, match="argument mode of the model has had 8 different texts"):
            assert validated(7)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not any(validated(step) for step in range(12))


def test_a_frozen_model_with_a_loss() -> None:
    """Without a graph, the number of targets of a loss is not known: such batches are not split."""

    class Scoring(Chain):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.c(self.b(self.a(x))), targets)

    model, x, targets = Scoring().requires_grad_(requires_grad=False), torch.randn(8, 8), torch.arange(8)
    plain = copy.deepcopy(model)
    with pipelined(model, ((x, targets), {})):
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
    split = r"split arguments: 0\.0 \(3-D\) along dimension 0, .* and 4 more"
    with parallel_model(Detecting(), backend=TWO) as model:
        assert model(images).shape == (8, 4, 4, 4)
    assert re.search(rf"forward fails on a part of the batch \(RuntimeError\)(.|\n)*{split}", plan(model).why)
    with pytest.raises(RuntimeError, match="expected input"):
        call(Detecting(), [torch.randn(5, 8, 8) for _ in range(8)])


def test_an_output_without_a_batch_dimension() -> None:
    """A tensor that differs between micro-batches and has no batch dimension cannot be used."""

    class Summing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x))).sum(0)

    output = call(Summing(), torch.randn(16, 8))
    assert repr(output) == "<output 0 of the model: tensors of (8,)>"
    with pytest.raises(ConfigError, match=r"output 0 of the model: tensors of \(8,\)"):
        output.mean()


def test_a_branch_that_depends_on_other_samples() -> None:
    """A given plan is validated, too: a batch with a branch on the mean over samples is not split."""
    case = CASES["early exit"]
    inputs = batch_of(case)
    message = "output 0 of the model, computed in micro-batches, differs"
    with pipelined(seeded(case.make), inputs) as model, not_split_once(message):
        torch.testing.assert_close(model(*inputs[0]), seeded(case.make)(*inputs[0]))


def test_outputs_of_different_structure() -> None:
    """Different numbers of values cannot be joined: using the output raises, by name; a call alone does not."""

    class Moody(Chain):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            y = self.c(self.b(self.a(x)))
            return [y, y] if x.sum() > 0 else [y]

    model = Moody()
    x = torch.cat([torch.ones(4, 8), -torch.ones(4, 8)])
    with pipelined(model, rows(8)):
        output = model(x)
    with pytest.raises(ConfigError, match="micro-batches return 1 and 2 values"):
        list(output)


def test_no_batch() -> None:
    """Inputs without a tensor of enough dimensions are not split."""
    with pipelined(seeded(lambda: nn.Sequential(nn.PReLU(), nn.PReLU())), rows(8)) as model:
        for _ in range(2):
            with not_split_once("no argument of the model has a dimension 0" if not _ else None):
                model(torch.tensor(3.0))


def test_packed_sequences() -> None:
    """A PackedSequence among the inputs is not split; the plan tells why."""
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 8), torch.randn(2, 8)])
    with parallel_model(nn.Sequential(nn.LSTM(8, 8)), backend=TWO) as model:
        output, _ = model(packed)
        assert output.data.shape == (5, 8)
    assert "PackedSequence" in plan(model).why


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
        with not_split_once("argument memory of the model is a Memory"):
            for _ in range(2):
                memory = Memory()
                torch.testing.assert_close(model(x, memory=memory), plain(x, memory=Memory()))
                assert [kept.shape for kept in memory.kept] == [(8, 8)]
        memory = Memory()
        with torch.no_grad():
            torch.testing.assert_close(model(x, memory=memory), plain(x, memory=Memory()))
        assert [kept.shape for kept in memory.kept] == [(8, 8)]


def test_an_object_among_the_outputs() -> None:
    """Objects that differ between micro-batches are refused when they are used, by name."""

    class Returning(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            return self.c(self.b(self.a(x))), Memory()

    y, memory = call(Returning(), torch.randn(8, 8))
    assert y.shape == (8, 8)
    for use in (lambda: memory.kept, lambda: memory[0], lambda: len(memory), lambda: bool(memory)):
        with pytest.raises(ConfigError, match=r"output 1 of the model: a Memory(.|\n)*use_cache = False"):
            use()


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


def test_composable_checkpoints() -> None:
    """A module that checkpoints itself by hooks is refused: torch keeps one forward's state on the module."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    checkpoint(model[1])
    message = r"_composable\.checkpoint of 1(?s:.*)recompute=True"
    with pytest.raises(ConfigError, match=message), parallel_model(model, backend=TWO):
        pass


def test_compiled_models() -> None:
    """A model that is compiled as a whole is refused: the calls of its submodules cannot be followed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.compile(backend="eager")
    with pytest.raises(ConfigError, match="the model is compiled"), parallel_model(model, backend=TWO):
        pass


def test_batch_norm_over_one_value() -> None:
    """Batches are not split into micro-batches of one sample, which torch's batch norm refuses; each counts once."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    plain, x = copy.deepcopy(model), torch.randn(8, 8)
    with pipelined(model, rows(8), microbatches=8):
        with not_split_once("forward fails on a part of the batch"):
            torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))
    assert model[1].num_batches_tracked == 2
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)


def test_python_rng_is_warned_of() -> None:
    """Micro-batches draw from `random` in random order, so a warning is given."""

    class Dropping(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)) * (random.random() > 2))

    with pytest.warns(UserWarning, match=r"Dropping draws from random or numpy\.random"):
        call(Dropping(), torch.randn(8, 8))


def test_a_model_that_fits_nowhere() -> None:
    """Limits below the parameters, and below the activations, report the smallest sufficient limit."""
    model = seeded(Gpt)
    cap = 40_000
    for known in ("even without activations, the best split needs", "why: the best split needs"):
        with pytest.raises(ConfigError, match=known) as caught:
            call(model, X, backend=BalancedBackend(devices=("cpu", "cpu"), memory=cap, microbatches=8))
        cap = int(str(caught.value).split("(")[1].split(" bytes")[0]) + 1
    enough = BalancedBackend(devices=("cpu", "cpu"), memory=cap, microbatches=8)
    assert call(model, X, backend=enough).shape == (8, 8, 11)


def test_invalid_options() -> None:
    """All invalid options of the backend are in one error."""
    wrong: dict[str, Any] = {
        "microbatches": 0,
        "recompute": "never",
        "batch_norm": "sync",
        "sync_batchnorm": True,
        "devices": ["gpu:0"],
    }
    with pytest.raises(ConfigError) as caught:
        BalancedBackend(**wrong)
    assert len(caught.value.faults) == 5


def test_limits_for_another_number_of_devices() -> None:
    """Memory limits are one for all devices, or one for each."""
    with pytest.raises(ConfigError, match="for 2 devices"):
        call(seeded(Gpt), X, backend=BalancedBackend(devices=("cpu", "cpu"), memory=(1, 2, 3)))


def test_a_plan_for_another_model_or_other_devices() -> None:
    """A plan is checked against the model and the devices before use."""
    made = plan_for(seeded(Gpt), INPUTS)
    other = BalancedBackend(devices=("cpu", "cpu"), plan=made)
    with pytest.raises(ConfigError, match=r"plan= is for Gpt \w+, and this is Chain"):
        call(Chain(), X, backend=other)
    elsewhere = plan_for(seeded(Gpt), INPUTS, device="cuda:7")
    with pytest.raises(ConfigError, match="plan= is for devices cuda:7"):
        call(seeded(Gpt), X, backend=BalancedBackend(devices=("cpu",), plan=elsewhere))


def test_options_that_contradict_a_plan() -> None:
    """All options that contradict a given plan are in one error; "auto" contradicts none."""
    made = plan_for(seeded(Gpt), INPUTS, memory_bytes=(2000.0, 1000.0))
    with pytest.raises(ConfigError) as caught:
        BalancedBackend(plan=made, microbatches=8, recompute=True, batch_norm="full", devices=("cpu",))
    assert [fault.what for fault in caught.value.faults] == [
        "plan= is for 4 micro-batches, with microbatches=8",
        "plan= is for 4 micro-batches, with batch_norm='full'",
        "plan= is for keeping activations, with recompute=True",
        "plan= is for devices cpu, cpu, with devices=['cpu']",
    ]
    for memory in (1999, (1999, 1999), (999, 2000)):
        with pytest.raises(ConfigError, match="plan= is for 2000 bytes on a device, with memory="):
            BalancedBackend(plan=made, memory=memory)
    two = ("cpu", "cpu")
    BalancedBackend(plan=made, microbatches=4, recompute=False, memory=(1000, 2000), devices=two)
    BalancedBackend(plan=replace(made, microbatches=1), batch_norm="full", devices=two)


def test_a_file_that_is_no_plan(tmp_path: Any) -> None:
    """Text, other JSON, and plans of another version are refused with the file's name."""
    path = tmp_path / "plan.json"
    for text in ("no plan", "[]", "{}", '{"format": 1, "model": "Gpt"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"plan\.json is not a plan"):
            Plan.load(path)


def test_a_model_without_a_plan() -> None:
    """plan() of a model that has not run explains how to get a plan."""
    with pytest.raises(ConfigError, match="run one batch first"):
        plan(seeded(Gpt))


def test_tokens_of_one_sample() -> None:
    """A first batch of one sample can be planned."""
    assert call(seeded(Gpt), tokens(1)[0][0]).shape == (1, 8, 11)
