"""The return of trained weights and optimizer states into the caller's own objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelize.call.module_sync import StatefulObjects, TrainingState, copy_module_state, module_state, restore


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", mask)


def expanded() -> torch.Tensor:
    return torch.tensor(1.0).expand(2, 2)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 2)


@pytest.mark.parametrize("make", [expanded, made_in_inference_mode])
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_a_buffer_that_refuses_an_in_place_copy_is_updated(make: Any, value: float) -> None:
    """Changed or not, without a warning, together with all other tensors."""
    module, trained = Masked(make()), Masked(torch.full((2, 2), value))
    assert copy_module_state(module, module_state(trained)) is None
    assert torch.equal(module.mask, trained.mask)
    assert torch.equal(module.linear.weight, trained.linear.weight)


def test_an_unchanged_expanded_buffer_stays_expanded() -> None:
    """A large mask takes no more memory than before."""
    module = Masked(expanded())
    copy_module_state(module, module_state(Masked(torch.ones(2, 2))))
    assert module.mask.stride() == (0, 0)


def test_tensors_that_cannot_be_written_are_named() -> None:
    """Tensors on the meta device have no values to write; all others are updated."""
    with torch.device("meta"):
        module = Masked(torch.ones(2, 2))
    module.mask = torch.zeros(2, 2)
    problem = copy_module_state(module, module_state(Masked(torch.ones(2, 2))))
    assert problem is not None
    assert problem.startswith("Masked: linear.bias, linear.weight ")
    assert "not copied back; return the module" in problem
    assert torch.equal(module.mask, torch.ones(2, 2))
    with torch.device("meta"):
        assert copy_module_state(nn.Linear(2, 2), module_state(nn.Linear(2, 2))) is None


def test_each_object_is_listed_once_and_submodules_with_their_module() -> None:
    """Modules, optimizers and schedulers; nothing else."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found = StatefulObjects()
    for each in (model, model[0], optimizer, model, scheduler, [], optimizer):
        found.add(each)
    assert found == [model, optimizer, scheduler]
    assert model[1] in found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def write_data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data + 1  # neither the identity nor the version of the parameter changes


@pytest.mark.parametrize("change", [write_data, nn.Module.eval, nn.Module.double])
def test_only_what_changed_is_returned(change: Any) -> None:
    """A module outside a block, too: written to through .data, as moving averages are, or in another mode or dtype."""
    frozen, changing = nn.Linear(1, 1), nn.Linear(1, 1)
    state = TrainingState([frozen, changing])
    assert state.changed([]) == {}
    change(changing)
    assert state.changed([]).keys() == {1}
    assert state.changed([frozen]).keys() == {0, 1}  # trained in a block


def test_an_optimizer_goes_on_where_the_call_ended() -> None:
    """Its state, settings and parameters that no module has are written into the caller's optimizer."""
    model, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    their_optimizer = torch.optim.Adam(theirs.parameters(), lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    their_scheduler = torch.optim.lr_scheduler.StepLR(their_optimizer, 1)
    state = TrainingState([their_optimizer, their_scheduler])
    step(theirs, their_optimizer)
    their_scheduler.step()
    assert restore([optimizer, scheduler], state.changed([])) == []
    assert torch.equal(model.weight, theirs.weight)
    assert optimizer.state_dict()["param_groups"] == their_optimizer.state_dict()["param_groups"]
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], their_optimizer.state[theirs.weight]["exp_avg"])
    assert scheduler.last_epoch == 1


def test_a_wrapper_keeps_the_groups_of_its_optimizer() -> None:
    """Sharpness-aware minimization holds another optimizer's list of groups: one learning rate for both."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    groups, group, states = optimizer.param_groups, optimizer.param_groups[0], optimizer.state
    state = TrainingState([optimizer])
    group["lr"] = 7.0
    changed = state.changed([])
    group["lr"] = 1.0
    assert restore([optimizer], changed) == []
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert optimizer.state is states
    assert group["lr"] == 7.0


def test_an_optimizer_with_other_groups_is_named() -> None:
    """A group that the function added does not fit into the caller's optimizer."""
    ours, theirs = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in range(2))
    state = TrainingState([theirs])
    theirs.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    [problem] = restore([ours], state.changed([]))
    assert problem.startswith("the state of SGD after the call does not fit the caller's (")


def test_modes_and_frozen_parameters_come_back() -> None:
    """As they would be after the function has run in this process."""
    ours, theirs = nn.Sequential(nn.Linear(1, 1), nn.Dropout()), nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    theirs[0].requires_grad_(False)
    theirs[1].eval()
    assert restore([ours], {0: module_state(theirs)}) == []
    assert (ours.training, ours[1].training) == (True, False)
    assert not any(each.requires_grad for each in ours.parameters())
