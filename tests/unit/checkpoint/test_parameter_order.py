"""The state of an optimizer goes by the names of its parameters, wherever its checkpoint has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ConfigError, load, save


class Net(nn.Module):
    """Layers of equal shapes, which are declared in the order of `names`."""

    def __init__(self, names: str = "abc") -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def mark(model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, float]:
    """Give each parameter a gradient of its own, step, and return the moment of each name."""
    for number, parameter in enumerate(model.parameters(), start=1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return moments(model, optimizer, prefix)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, float]:
    found = {}
    for name, parameter in model.named_parameters():
        found[prefix + name] = float(optimizer.state[parameter]["exp_avg"].mean())
    return found


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("order", ["layers", "list", "names of torch"])
def test_another_order_is_put_right(tmp_path: Path, sharded: bool, order: str) -> None:
    """Layers that are declared, or parameters that are listed, in another order get their own moments."""
    model = Net()
    optimizer = adam(model.parameters())
    expected = mark(model, optimizer)
    save(tmp_path / "last", sharded=sharded, model=model, optimizer=optimizer)
    if order == "layers":
        other = Net("cab")
        others = adam(other.parameters())
    elif order == "list":
        other = Net()
        others = adam(list(other.parameters())[::-1])
    else:
        other = Net("cab")
        others = adam(other.named_parameters())
    load(tmp_path / "last", model=other, optimizer=others)
    assert moments(other, others) == expected
    mark(other, others)


def test_the_order_in_each_group_is_put_right(tmp_path: Path) -> None:
    """Of two groups, each with another order in it, both get the moments and options of their parameters."""

    def of(model: nn.Module, step: int) -> torch.optim.Optimizer:
        weights = [parameter for name, parameter in model.named_parameters() if "weight" in name]
        biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
        return adam([{"params": weights[::step], "lr": 0.2}, {"params": biases[::step]}])

    model, other = Net(), Net("bca")
    optimizer, others = of(model, 1), of(other, -1)
    expected = mark(model, optimizer)
    save(tmp_path / "last", model=model, optimizer=optimizer)
    load(tmp_path / "last", model=other, optimizer=others)
    assert moments(other, others) == expected
    assert [group["lr"] for group in others.param_groups] == [0.2, 0.1]


def some(*names: str) -> Callable[[nn.Module], list[nn.Parameter]]:
    return lambda model: [model.get_parameter(name) for name in names]


OTHER_SETS: dict[str, tuple[Any, Any, str]] = {
    "others": (
        some("a.weight", "a.bias"),
        some("a.weight", "b.bias"),
        r"model\.a\.bias is not in the optimizer",
    ),
    "fewer": (
        some("a.weight", "b.weight"),
        some("b.weight"),
        r"model\.a\.weight is not in the optimizer",
    ),
    "more": (
        some("a.weight"),
        some("b.weight", "a.weight"),
        r"model\.b\.weight is not in the checkpoint",
    ),
    "groups": (
        lambda model: [{"params": [model.a.weight]}, {"params": [model.b.weight]}],
        lambda model: [{"params": [model.b.weight]}, {"params": [model.a.weight]}],
        r"model\.b\.weight is in group 0, and in group 1 of the checkpoint",
    ),
}


@pytest.mark.parametrize("case", OTHER_SETS)
def test_another_set_is_refused(tmp_path: Path, case: str) -> None:
    """The error names the first parameter that is not on both sides, or in another group; nothing changes."""
    parameters_at_save, parameters_at_load, message = OTHER_SETS[case]
    model, other = Net(), Net()
    optimizer = adam(parameters_at_save(model))
    mark_some(model, optimizer)
    save(tmp_path / "last", model=model, optimizer=optimizer)
    others = adam(parameters_at_load(other))
    before = other.a.weight.clone()
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "last", model=other, optimizer=others)
    assert torch.equal(other.a.weight, before)
    assert not others.state


def mark_some(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def without_names(path: Path) -> None:
    """Take the names out of a file, as earlier versions of this library wrote it."""
    content = torch.load(path, weights_only=True)
    details = content["_parallelize"]["objects"]["optimizer"]
    for key in [key for key in details if key.startswith("name of parameter")]:
        del details[key]
    torch.save(content, path)


def of_torch(path: Path) -> None:
    """Turn a file into one of torch.save."""
    content = torch.load(path, weights_only=True)
    del content["_parallelize"]
    torch.save(content, path)


@pytest.mark.parametrize("change", [without_names, of_torch, None])
def test_without_names_the_position_counts(tmp_path: Path, change: Callable[[Path], None] | None) -> None:
    """Files of earlier versions and of torch, and an optimizer that is loaded alone, go by position, as in torch."""
    path = tmp_path / "last.pt"
    model, other = Net(), Net("cba")
    optimizer, others = adam(model.parameters()), adam(other.parameters())
    expected = mark(model, optimizer)
    save(path, model=model, optimizer=optimizer)
    if change is None:
        load(path, optimizer=others)
    else:
        change(path)
        load(path, model=other, optimizer=others)
    assert list(moments(other, others).values()) == list(expected.values())


def test_a_tied_weight_has_all_of_its_names(tmp_path: Path) -> None:
    """A weight whose first name is another one, because its layers are declared in another order, is found."""

    def tied(names: str) -> nn.Module:
        model = Net(names)
        model.b.weight = model.a.weight
        return model

    model, other = tied("abc"), tied("cba")
    optimizer, others = adam(model.parameters()), adam(other.parameters())
    expected = mark(model, optimizer)
    save(tmp_path / "last", model=model, optimizer=optimizer)
    load(tmp_path / "last", model=other, optimizer=others)
    found = moments(other, others)
    assert found.pop("b.weight") == expected.pop("a.weight")
    assert found == expected


@pytest.mark.parametrize("sharded", [False, True])
def test_two_models_whose_parameters_have_equal_names(tmp_path: Path, sharded: bool) -> None:
    """One optimizer of two models with equal names of weights is saved and loaded, in a file and in a folder."""

    def trained(names: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        first, second = Net(names), Net(names)
        return first, second, adam([*first.parameters(), *second.parameters()])

    first, second, optimizer = trained("abc")
    expected = {}
    for number, parameter in enumerate([*first.parameters(), *second.parameters()], start=1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    expected = moments(first, optimizer, "first.") | moments(second, optimizer, "second.")
    save(tmp_path / "last", sharded=sharded, first=first, second=second, optimizer=optimizer)
    other_first, other_second, others = trained("cab")
    load(tmp_path / "last", first=other_first, second=other_second, optimizer=others)
    assert moments(other_first, others, "first.") | moments(other_second, others, "second.") == expected


@pytest.mark.parametrize("names", ["abc", "cba"])
def test_a_state_of_all_parameters_at_once(tmp_path: Path, names: str) -> None:
    """LBFGS keeps one vector of all parameters: in the same order it is loaded, in another one refused."""

    def trained(names: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(names)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(torch.ones(2, 3)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        return model, optimizer

    model, optimizer = trained("abc")
    save(tmp_path / "last", model=model, optimizer=optimizer)
    other, others = trained(names)
    if names == "abc":
        load(tmp_path / "last", model=other, optimizer=others)
        return
    with pytest.raises(ConfigError, match=r"in another order.*LBFGS"):
        load(tmp_path / "last", model=other, optimizer=others)


@pytest.mark.parametrize("compiled_at", ["save", "load"])
def test_compiled_models_have_plain_names(tmp_path: Path, compiled_at: str) -> None:
    """What torch.compile adds to names does not make another set of parameters."""
    compiled = functools.partial(torch.compile, backend="eager")
    model: Any = Net()
    other: Any = Net("cba")
    optimizer, others = adam(model.parameters()), adam(other.parameters())
    expected = mark(model, optimizer)
    wrapped, other_wrapped = (compiled(model), other) if compiled_at == "save" else (model, compiled(other))
    save(tmp_path / "last", model=wrapped, optimizer=optimizer)
    load(tmp_path / "last", model=other_wrapped, optimizer=others)
    assert moments(other, others) == expected


def test_a_model_of_another_name(tmp_path: Path) -> None:
    """If the call does not load the model that the names are of, the position counts."""
    model: Sequence[Any] = Net(), Net()
    optimizer, others = adam(model[0].parameters()), adam(model[1].parameters())
    expected = mark(model[0], optimizer)
    save(tmp_path / "last", model=model[0], optimizer=optimizer, part=model[0].a)
    load(tmp_path / "last", part=model[1].a, optimizer=others)
    assert moments(model[1], others) == expected
