"""What a trial of a forward changes is put back: tensors of any shape, attributes, generators."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import BalancedBackend, parallel_model
from parallelize.backends.model_state import ModelState

CPU = torch.device("cpu")
SPLIT = BalancedBackend(devices=["cpu", "cpu"], microbatches=2)


class Observed(nn.Module):
    """Has a buffer that gets its shape in the first forward, as the observers of torch.ao have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("low", torch.tensor([]))
        self.low: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        low = y.detach().amin(0)
        if not self.low.numel():
            self.low.resize_(low.shape).copy_(low)
        self.low.copy_(torch.minimum(self.low, low))
        return y


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.rand(4, generator=self.generator)


class Counting(nn.Module):
    """Keeps numbers, a list and a dict, and overrides `parameters` with another signature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0
        self.seen: list[int] = []
        self.cache: dict[str, torch.Tensor] = {}

    def parameters(self, learning_rate: float) -> list[dict[str, Any]]:
        return [{"params": list(self.layer.parameters()), "lr": learning_rate}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.cache["latest"] = x
        with torch.no_grad():
            self.frozen.weight.mul_(0.5)
        return self.layer(self.frozen(x))


class Remembering(nn.Module):
    """Keeps the outputs of each layer in a list of lists, and the latest ones in other containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.outputs: list[Any] = [[]]
        self.by_name: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.latest: deque[torch.Tensor] = deque(maxlen=2)
        self.outputs.append(self.outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.outputs[0].append(output)
        self.by_name["layer"].append(output)
        self.latest.append(output)
        return torch.stack([*self.outputs[0], *self.by_name["layer"], *self.latest]).sum(0)


def trial(model: nn.Module) -> tuple[ModelState, torch.Tensor]:
    state = ModelState(model, [CPU])
    with state.watching():
        output = model(torch.ones(2, 4))
    return state, output


def test_a_buffer_gets_its_former_shape() -> None:
    """A buffer that forward has resized is empty again, and a second trial resizes it again."""
    model = Observed()
    state, output = trial(model)
    assert state.changed() == ["low"]
    for _ in range(2):
        state.restore()
        assert model.low.shape == (0,)
        assert torch.equal(model(torch.ones(2, 4)), output)
        assert model.low.shape == (4,)


def test_a_generator_of_a_module_draws_the_same_numbers_again() -> None:
    """It is restored as the global generators are."""
    model = Noisy()
    state, output = trial(model)
    state.restore()
    assert torch.equal(model(torch.ones(2, 4)), output)


def test_attributes_containers_and_parameters_are_put_back() -> None:
    """They are named, also if the model's `parameters` returns another list for its optimizer."""
    model = Counting()
    weight = model.frozen.weight.detach().clone()
    state, _ = trial(model)
    assert sorted(state.changed()) == ["cache", "calls", "frozen.weight", "seen"]
    state.restore()
    assert (model.calls, model.seen, model.cache) == (0, [], {})
    assert torch.equal(model.frozen.weight, weight)


def test_hooks_that_were_registered_since_stay() -> None:
    """A trial moves the arguments of submodules by hooks, which are there before the first `restore`."""
    model = nn.Linear(2, 2)
    state = ModelState(model, [CPU])
    calls = []
    model.register_forward_pre_hook(lambda _module, args: calls.append(args))
    state.restore()
    model(torch.ones(1, 2))
    assert len(calls) == 1


def test_containers_in_containers_are_put_back() -> None:
    """Also those of the standard library, and a list that contains itself."""
    model = Remembering()
    state, _ = trial(model)
    assert state.changed() == ["outputs", "by_name", "latest"]
    state.restore()
    assert (model.outputs[0], model.by_name, list(model.latest)) == ([], {}, [])
    assert model.outputs[1] is model.outputs


@pytest.mark.filterwarnings("ignore:batches like this one are not split")
@pytest.mark.parametrize("make", [Observed, Noisy, Remembering])
@pytest.mark.parametrize("backend", ["auto", SPLIT], ids=["auto", "balanced"])
def test_trials_leave_the_model_as_it_was(make: Callable[[], Any], backend: Any) -> None:
    """A program trains to the state of one device, though the backend runs forward beforehand."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    if isinstance(model, Noisy):
        plain.generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, 4)
    with parallel_model(model, backend=backend):
        outputs = [model(x).detach() for x in rows]
    torch.testing.assert_close(outputs, [plain(x).detach() for x in rows])
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
