"""The Apex engine.

No Apex with `amp` can be installed with a current torch, so these tests run against a fake of its documented
interface, on the CPU and in fp32: initialize(), which puts masters into the optimizer, scale_loss() and the state.
Apex's kernels are tested in tests/gpu, if an Apex is installed.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from parallelize.cluster.world import World
from parallelize.errors import ConfigError, MissingDependencyError
from parallelize.plugins.base import Amp
from parallelize.precision.apex import ApexPrecision

SCALE = 8.0


class FakeApexAmp(types.ModuleType):
    """apex.amp as documented, for O2: masters in the optimizer, scaled gradients in the model."""

    def __init__(self) -> None:
        super().__init__("apex.amp")
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.calls: list[dict[str, Any]] = []

    def initialize(self, models: list[nn.Module], optimizers: list[Any], **options: Any) -> Any:
        self.calls.append(options)
        for model in models:
            model.to(torch.bfloat16)
            model.forward = self.cast_inputs_and_outputs(model.forward)
        for optimizer in optimizers:
            optimizer._amp_stash = object()
            plain_step = optimizer.step
            for group in optimizer.param_groups:
                for index, each in enumerate(group["params"]):
                    master = each.detach().clone().float().requires_grad_()
                    self.pairs.append((each, master))
                    group["params"][index] = master
            optimizer.step = lambda plain_step=plain_step: (plain_step(), self.copy_to_models())[0]
        return models, optimizers

    def cast_inputs_and_outputs(self, forward: Any) -> Any:
        return lambda x: forward(x.bfloat16()).float()

    def copy_to_models(self) -> None:
        for each, master in self.pairs:
            each.data.copy_(master)
            master.grad = None

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizers: list[Any]) -> Iterator[torch.Tensor]:
        yield loss.float() * SCALE
        for each, master in self.pairs:
            if each.grad is not None:
                master.grad = each.grad.float() / SCALE

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": SCALE, "unskipped": 1}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(state)


@pytest.fixture
def fake_amp(monkeypatch: pytest.MonkeyPatch) -> FakeApexAmp:
    apex: Any = types.ModuleType("apex")
    apex.amp = FakeApexAmp()
    monkeypatch.setitem(sys.modules, "apex", apex)
    return apex.amp


def open_apex(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    # The engine declares no CPU support; the fake computes on the CPU, and nothing uses this CUDA device.
    device = torch.device("cuda", 0)
    return ApexPrecision().open(
        amp=Amp(dtype=torch.float16), models=[model], optimizers=optimizers, device=device, world=World()
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_a_loop_trains_the_masters(fake_amp: FakeApexAmp) -> None:
    """Backward is scaled by Apex, clipping uses the masters, and the model ends trained and in fp32."""
    model = net()
    parameters = list(model.parameters())
    before = [each.detach().clone() for each in parameters]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with open_apex(model, optimizer):
        assert fake_amp.calls[0]["opt_level"] == "O2"
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert total > 1e-3
        masters = [each for group in optimizer.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in masters]).norm()
        assert norm.item() == pytest.approx(1e-3, rel=0.01)
        trained = [each.detach().clone() for each in masters]
        optimizer.step()
        assert not torch.equal(masters[0], trained[0])
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [each for group in optimizer.param_groups for each in group["params"]] == parameters
    for each, master in zip(parameters, masters, strict=True):
        assert each.dtype is torch.float32
        assert torch.equal(each, master)
        assert "momentum_buffer" in optimizer.state[each]
    assert not torch.equal(parameters[0], before[0])


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_every_patch_is_removed(fake_amp: FakeApexAmp, error: type[Exception] | None) -> None:
    """Functions of torch, the model's forward and the optimizer's methods are restored, also after an exception."""

    def patched() -> list[Any]:
        utils = torch.nn.utils
        return [torch.autograd.backward, utils.clip_grad_norm_, utils.clip_grad.clip_grad_value_]

    before, model = patched(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attributes = set(optimizer.__dict__)
    with contextlib.suppress(RuntimeError), open_apex(model, optimizer):
        assert patched() != before
        assert "forward" in model.__dict__
        if error is not None:
            raise error
    assert patched() == before
    assert "forward" not in model.__dict__
    assert set(optimizer.__dict__) == attributes


def test_state_is_that_of_apex(fake_amp: FakeApexAmp) -> None:
    """state_dict and load_state_dict are those of apex.amp."""
    model = net()
    with open_apex(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        state = session.state_dict()
        assert state == fake_amp.state_dict()
        session.load_state_dict(state)
        assert fake_amp.calls[-1] == state


def test_several_roots_are_refused(fake_amp: FakeApexAmp) -> None:
    """Apex scales one loss at a time."""
    model = net()
    with open_apex(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        out = model(torch.randn(4, 3)).sum()
        with pytest.raises(ConfigError, match="backward from 2 tensors") as caught:
            torch.autograd.backward([out, out])
    assert "amp_engine='native'" in caught.value.faults[0].fix


def test_optimizers_are_required(fake_amp: FakeApexAmp) -> None:
    """The error says how to pass them."""
    with pytest.raises(ConfigError, match="without optimizers") as caught:
        open_apex(net())
    assert "parallel_model(model, optimizers=optimizer)" in caught.value.faults[0].fix


def test_an_apex_without_amp_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """For PyPI's apex, and NVIDIA's since 2025, the error has the file that was found and a fix."""
    apex = types.ModuleType("apex")
    apex.__file__ = "/somewhere/apex/__init__.py"
    monkeypatch.setitem(sys.modules, "apex", apex)
    with pytest.raises(MissingDependencyError, match=r"has no amp: /somewhere/apex/__init__.py") as caught:
        open_apex(net())
    (fault,) = caught.value.faults
    assert "removed apex.amp in 2025" in fault.why
    assert "unrelated" in fault.why
    assert "amp_engine='native'" in fault.fix


def test_no_apex_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apex the error suggests the native engine."""
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(MissingDependencyError, match="cannot be imported") as caught:
        open_apex(net())
    assert isinstance(caught.value, ImportError)
    assert "amp_engine='native'" in caught.value.faults[0].fix


def test_apex_is_not_imported_with_the_package(run_script: Any) -> None:
    """`import parallelize`, and listing the names of the engines, import no apex."""
    found = run_script(
        """
        import sys
        import parallelize
        from parallelize.plugins import registry
        print(registry.names("precision"), "apex" in sys.modules)
        """,
        how="-c",
    )
    assert found.stdout.strip() == "('apex', 'native') False"
