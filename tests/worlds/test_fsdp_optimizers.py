"""Optimizers and averages of research code train under fsdp and HSDP what they train in one process.

Each is written as its authors publish it: a loop over parameters, which reads whole matrices where it needs them.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from one_word.optimizers import zeropower_via_newtonschulz5
from torch import Tensor, nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from parallelize import FSDPBackend, distributed, parallel_model, shard_loader

pytestmark = pytest.mark.slow

WORLDS: dict[str, dict[str, Any]] = {
    "one process": {"processes": 1},
    "fsdp": {"processes": 2, "backend": "fsdp"},
    "hsdp": {"processes": 4, "backend": FSDPBackend(shard_over=2)},
}


class Block(nn.Module):
    """A residual block: square and oblong matrices, vectors, and sizes that no number of ranks divides."""

    def __init__(self, width: int = 5, inner: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between which activations are kept, or are recomputed where `is_reentrant` is given."""

    def __init__(self, *, is_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.ones(()))
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            run = block if self.is_reentrant is None else functools.partial(checkpoint, block)
            options = {} if self.is_reentrant is None else {"use_reentrant": self.is_reentrant}
            x = run(x, **options)
        return self.head(x) * self.gain


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sin())


def loader() -> Iterable[Any]:
    return shard_loader(DataLoader(data(), batch_size=8), batch="global")


def values(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def state_of(optimizer: optim.Optimizer, model: nn.Module) -> list[Any]:
    return [optimizer.state[parameter] for parameter in model.parameters()]


class Shampoo(optim.Optimizer):
    """Source: Gupta et al. 2018, "Shampoo: Preconditioned Stochastic Tensor Optimization"."""

    def __init__(self, params: Any, lr: float = 0.1, epsilon: float = 1e-2, update_freq: int = 2) -> None:
        super().__init__(params, {"lr": lr, "epsilon": epsilon, "update_freq": update_freq})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    for dim_id, dim in enumerate(grad.size()):
                        state[f"precond_{dim_id}"] = group["epsilon"] * torch.eye(dim, out=grad.new(dim, dim))
                        state[f"inv_precond_{dim_id}"] = grad.new(dim, dim).zero_()
                order = grad.ndimension()
                for dim_id, dim in enumerate(grad.size()):
                    precond = state[f"precond_{dim_id}"]
                    inv_precond = state[f"inv_precond_{dim_id}"]
                    grad = grad.transpose(0, dim_id).contiguous()
                    transposed_size = grad.size()
                    grad = grad.view(dim, -1)
                    grad_t = grad.t()
                    precond.add_(grad @ grad_t)
                    if state["step"] % group["update_freq"] == 0:
                        eigenvalues, vectors = torch.linalg.eigh(precond)
                        inv_precond.copy_(vectors @ eigenvalues.pow(-1 / (2 * order)).diag() @ vectors.t())
                    if dim_id == order - 1:
                        grad = grad_t @ inv_precond
                        grad = grad.view(p.size())
                    else:
                        grad = inv_precond @ grad
                        grad = grad.view(transposed_size)
                state["step"] += 1
                p.data.add_(grad, alpha=-group["lr"])


class SOAP(optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner, of the smaller side of a matrix, and of no vector.

    The preconditioner of the larger side has no full rank, so that rounding would decide on its basis.

    Source: Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam"
    """

    def __init__(self, params: Any, lr: float = 0.05, frequency: int = 2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "shampoo_beta": 0.9, "frequency": frequency})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(grad)
                    state["exp_avg_sq"] = torch.zeros_like(grad)
                    self.init_preconditioner(grad, state)
                    self.update_preconditioner(grad, state, group)
                    continue  # the first step is skipped, as it has no eigenbasis yet
                grad_projected = self.project(grad, state)
                state["step"] += 1
                beta1, beta2 = group["betas"]
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).add_(grad_projected.square(), alpha=1 - beta2)
                denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
                exp_avg_projected = self.project(state["exp_avg"], state)
                step_size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                p.add_(self.project_back(exp_avg_projected / denominator, state), alpha=-step_size)
                self.update_preconditioner(grad, state, group)

    def init_preconditioner(self, grad: Tensor, state: Any) -> None:
        state["GG"], state["Q"] = [], None
        for size in grad.shape:
            is_used = grad.dim() > 1 and size == min(grad.shape)
            state["GG"].append(torch.zeros(size, size, dtype=grad.dtype) if is_used else [])

    def project(self, grad: Tensor, state: Any) -> Tensor:
        for matrix in state["Q"]:
            if len(matrix) > 0:
                grad = torch.tensordot(grad, matrix, dims=[[0], [0]])
            elif grad.dim() > 1:
                grad = grad.permute([*range(1, grad.dim()), 0])
        return grad

    def project_back(self, grad: Tensor, state: Any) -> Tensor:
        for matrix in state["Q"]:
            if len(matrix) > 0:
                grad = torch.tensordot(grad, matrix, dims=[[0], [1]])
            elif grad.dim() > 1:
                grad = grad.permute([*range(1, grad.dim()), 0])
        return grad

    def update_preconditioner(self, grad: Tensor, state: Any, group: Any) -> None:
        for index, matrix in enumerate(state["GG"]):
            if len(matrix) > 0:
                others = [axis for axis in range(grad.dim()) if axis != index]
                outer = torch.tensordot(grad, grad, dims=[others, others])
                matrix.lerp_(outer, 1 - group["shampoo_beta"])
        if state["Q"] is None:
            state["Q"] = [torch.linalg.eigh(m)[1].flip([1]) if len(m) > 0 else [] for m in state["GG"]]
        elif state["step"] % group["frequency"] == 0:
            for index, (matrix, basis) in enumerate(zip(state["GG"], state["Q"], strict=True)):
                if len(matrix) > 0:
                    order = torch.diag(basis.T @ matrix @ basis).argsort(descending=True)
                    state["exp_avg_sq"] = state["exp_avg_sq"].index_select(index, order)
                    state["Q"][index] = torch.linalg.qr(matrix @ basis[:, order])[0]


class MuonWithAuxAdam(optim.Optimizer):
    """Muon for matrices, and Adam for the other parameters, in one optimizer.

    Source: https://github.com/KellerJordan/Muon
    """

    def __init__(self, param_groups: Any) -> None:
        super().__init__(param_groups, {"lr": 0.02, "momentum": 0.95, "betas": (0.9, 0.95), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if group["use_muon"]:
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    grad, momentum = p.grad, state["momentum_buffer"]
                    momentum.lerp_(grad, 1 - group["momentum"])
                    update = grad.lerp_(momentum, group["momentum"])
                    update = zeropower_via_newtonschulz5(update)
                    update *= max(1, grad.size(-2) / grad.size(-1)) ** 0.5
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.reshape(p.shape), alpha=-group["lr"])
                    continue
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["step"] = 0
                state["step"] += 1
                beta1, beta2 = group["betas"]
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
                corrected = state["exp_avg"] / (1 - beta1 ** state["step"])
                denominator = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + 1e-10
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(corrected / denominator, alpha=-group["lr"])


def muon(model: nn.Module) -> optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return MuonWithAuxAdam([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])


class Lion(optim.Optimizer):
    """Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1.0 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1.0 - beta2)


class SophiaG(optim.Optimizer):
    """Source: Liu et al. 2023, "Sophia: A Scalable Stochastic Second-order Optimizer"."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.965, 0.99), "rho": 0.04, "weight_decay": 0.1})

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "hessian" not in state:
                    state["exp_avg"], state["hessian"] = torch.zeros_like(p), torch.zeros_like(p)
                beta2 = group["betas"][1]
                state["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def step(self, closure: Any = None, bs: int = 8) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(group["betas"][0]).add_(p.grad, alpha=1 - group["betas"][0])
                ratio = (state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class Adam8bit(optim.Optimizer):
    """Adam whose state is int8, with a scale for each block of 4 elements.

    Source: Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"
    """

    BLOCK = 4

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    def quantize(self, value: Tensor, state: Any, key: str) -> None:
        flat = nn.functional.pad(value.flatten(), (0, -value.numel() % self.BLOCK)).view(-1, self.BLOCK)
        absmax = flat.abs().amax(1, keepdim=True).clamp_min(1e-12)
        codes = (flat / absmax * 127).round().to(torch.int8)
        state[key].copy_(codes.flatten()[: value.numel()].view(value.shape))
        state[key + "_absmax"] = absmax

    def dequantize(self, state: Any, key: str) -> Tensor:
        codes = state[key]
        flat = nn.functional.pad(codes.flatten(), (0, -codes.numel() % self.BLOCK)).view(-1, self.BLOCK)
        full = flat.to(state[key + "_absmax"].dtype) / 127 * state[key + "_absmax"]
        return full.flatten()[: codes.numel()].view(codes.shape)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    for key in ("m", "v"):
                        state[key] = torch.zeros_like(p, dtype=torch.int8)
                        self.quantize(torch.zeros_like(p), state, key)
                    state["step"] = torch.zeros(())
                state["step"] += 1
                m = self.dequantize(state, "m").lerp(p.grad, 1 - group["betas"][0])
                v = self.dequantize(state, "v").abs().lerp(p.grad.square(), 1 - group["betas"][1])
                p.add_(m / (v.sqrt() + 1e-3), alpha=-group["lr"])
                self.quantize(m, state, "m")
                self.quantize(v, state, "v")


class GaLoreAdamW(optim.Optimizer):
    """Adam on a low-rank projection of the gradients of matrices.

    Source: Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection"
    """

    def __init__(self, params: Any, lr: float = 0.05, rank: int = 2, gap: int = 3) -> None:
        super().__init__(params, {"lr": lr, "rank": rank, "gap": gap})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                state.setdefault("step", 0)
                is_matrix = grad.ndim == 2
                if is_matrix:
                    if state["step"] % group["gap"] == 0:
                        vectors = torch.linalg.svd(grad, full_matrices=False)[0][:, : group["rank"]]
                        # Rounding decides on the signs of singular vectors, also in one process.
                        state["projector"] = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
                    grad = state["projector"].T @ grad
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-3)
                p.add_(state["projector"] @ update if is_matrix else update, alpha=-group["lr"])


class ScheduleFreeSGD(optim.Optimizer):
    """Parameters are the average x in evaluation, and y in training.

    Source: Defazio et al. 2024, "The Road Less Scheduled"
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def move(self, weight_of: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(end=self.state[p]["z"], weight=weight_of(group["beta"]))

    def eval(self) -> None:
        self.move(lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self.move(lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        for group in self.param_groups:
            ckp1 = 1 / (group["k"] + 1)
            for p in group["params"]:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p, memory_format=torch.preserve_format)
                y, z, grad = p.data, self.state[p]["z"], p.grad.data
                y.lerp_(end=z, weight=ckp1)
                y.add_(grad, alpha=group["lr"] * (group["beta"] * (1 - ckp1) - 1))
                z.sub_(grad, alpha=group["lr"])
            group["k"] += 1


class Prodigy(optim.Optimizer):
    """Adam that estimates its learning rate from inner products over all parameters.

    Source: Mishchenko and Defazio 2023, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner"
    """

    def __init__(self, params: Any, d0: float = 1e-3) -> None:
        super().__init__(params, {"d": d0, "d0": d0, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as published
        group = self.param_groups[0]
        d, beta2, denominator = group["d"], 0.99, 0.0
        group["numerator"] *= beta2**0.5
        for p in group["params"]:
            grad, state = p.grad.data, self.state[p]
            if "p0" not in state:
                state["p0"] = p.detach().clone()
                for key in ("s", "exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(p.data).detach()
            inner = torch.dot(grad.flatten(), (state["p0"].data - p.data).flatten()).item()
            group["numerator"] += (d / group["d0"]) * d * inner
            state["exp_avg"].mul_(0.9).add_(grad, alpha=d * 0.1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta2**0.5).add_(grad, alpha=(d / group["d0"]) * d)
            denominator += state["s"].abs().sum().item()
        group["d"] = max(d, group["numerator"] / denominator)
        for p in group["params"]:
            state = self.state[p]
            p.data.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-d)


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "shampoo": lambda model: Shampoo(model.parameters()),
    "soap": lambda model: SOAP(model.parameters()),
    "muon": muon,
    "lion": lambda model: Lion(model.parameters()),
    "sophia": lambda model: SophiaG(model.parameters()),
    "adam8bit": lambda model: Adam8bit(model.parameters()),
    "galore": lambda model: GaLoreAdamW(model.parameters()),
    "schedule_free": lambda model: ScheduleFreeSGD(model.parameters()),
    "prodigy": lambda model: Prodigy(model.parameters()),
}


def train(model: nn.Module, optimizer: Any, after_step: Callable[[], Any] = lambda: None) -> None:
    for inputs, targets in loader():
        optimizer.zero_grad()
        if isinstance(optimizer, SophiaG):
            model(inputs).square().mean().backward()
            optimizer.update_hessian()
            optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        after_step()


def with_optimizer(name: str) -> Any:
    """Train two epochs in a block, with the rates of a scheduler, and one epoch in another block."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer: Any = OPTIMIZERS[name](model)
    evaluated = []
    for epochs in (2, 1):
        with parallel_model(model):
            for _ in range(epochs):
                train(model, optimizer)
            if name == "schedule_free":
                optimizer.eval()
                evaluated.append(values(model))
                optimizer.train()
    return values(model), state_of(optimizer, model), evaluated


class LoRALinear(nn.Module):
    """A frozen linear layer in bf16, and a trained update of low rank in fp32.

    Source: peft.tuners.lora.Linear
    """

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.bfloat16().requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = 2.0
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x.to(torch.bfloat16))
        if self.merged:
            return result.to(x.dtype)
        return result + self.lora_B(self.lora_A(x.float())) * self.scaling

    @torch.no_grad()
    def merge(self) -> None:
        delta = self.lora_B.weight @ self.lora_A.weight * self.scaling
        self.base_layer.weight.data += delta.to(self.base_layer.weight.dtype)
        self.merged = True


def lora(*, is_merged_in_block: bool) -> Any:
    """Train adapters, save what is trained, and merge."""
    torch.manual_seed(0)
    model = Net().float().requires_grad_(False)
    for block in model.blocks:
        for name in ("mix", "up", "down"):
            setattr(block, name, LoRALinear(getattr(block, name)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optim.AdamW(trained, lr=0.02)
    adapters: list[LoRALinear] = [module for module in model.modules() if isinstance(module, LoRALinear)]

    def merge() -> None:
        for adapter in adapters:
            adapter.merge()

    with parallel_model(model):
        for _ in range(2):
            for inputs, targets in loader():
                optimizer.zero_grad()
                (model(inputs.float()) - targets.float()).square().mean().backward()
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
        saved = {key: value.clone() for key, value in model.state_dict().items() if "lora_" in key}
        if is_merged_in_block:
            merge()
            with torch.no_grad():
                model(data().tensors[0].float())
    if not is_merged_in_block:
        merge()
    return saved, values(model)


@torch.no_grad()
def update(average: nn.Module, model: nn.Module) -> None:
    for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(parameter, 0.1)


def ema_copies(*, is_before: bool) -> Any:
    """A deep copy, torch's AveragedModel, and tensors by hand, which are swapped in to evaluate."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    averages = dict[str, Any]()

    def copies() -> None:
        averages["copy"] = copy.deepcopy(model).requires_grad_(False)
        averages["averaged"] = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        averages["by hand"] = [parameter.detach().clone() for parameter in model.parameters()]

    def update_all() -> None:
        update(averages["copy"], model)
        averages["averaged"].update_parameters(model)
        with torch.no_grad():
            for kept, parameter in zip(averages["by hand"], model.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter.detach(), alpha=0.1)

    outputs = []
    inputs = data().tensors[0]
    if is_before:
        copies()
    with parallel_model(model):
        if not is_before:
            copies()
        for _ in range(2):
            train(model, optimizer, update_all)
            backup = [parameter.data.clone() for parameter in model.parameters()]
            for parameter, kept in zip(model.parameters(), averages["by hand"], strict=True):
                parameter.data.copy_(kept)
            with torch.no_grad():
                outputs += [model(inputs), averages["copy"](inputs), averages["averaged"](inputs)]
            for parameter, kept in zip(model.parameters(), backup, strict=True):
                parameter.data.copy_(kept)
    return values(model), values(averages["copy"]), values(averages["averaged"]), averages["by hand"], outputs


def swa() -> Any:
    """Average weights over epochs with torch's own classes, and compute batch norm's statistics anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 5)).double().eval()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    with parallel_model(model):
        average = AveragedModel(model)
        for _ in range(3):
            train(model, optimizer)
            average.update_parameters(model)
            schedule.step()
    update_bn(DataLoader(data(), batch_size=8), average)
    return values(model), values(average)


def checkpointed(*, is_reentrant: bool) -> Any:
    """Recompute blocks in backward."""
    torch.manual_seed(0)
    model = Net(is_reentrant=is_reentrant).double()
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    with parallel_model(model):
        for inputs, targets in loader():
            optimizer.zero_grad()
            inputs.requires_grad_(is_reentrant)
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
    return values(model)


class OwnStep(optim.AdamW):
    """An optimizer of torch with a step of the user's own, which calls torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def fused(kind: type[optim.Optimizer], *, has_closure: bool) -> Any:
    """Take steps that see full tensors with torch's fused kernels, which count no version of what they write."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = kind(model.parameters(), lr=0.05, fused=True)
    with parallel_model(model):
        for inputs, targets in loader():

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = (model(inputs) - targets).square().mean()
                loss.backward()
                return loss

            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return values(model), state_of(optimizer, model)


PROGRAMS: dict[str, Callable[[], Any]] = {
    **{
        f"fused {kind.__name__} with a closure": functools.partial(fused, kind, has_closure=True)
        for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
    },
    "fused, with a step of its own": functools.partial(fused, OwnStep, has_closure=False),
    **{name: functools.partial(with_optimizer, name) for name in OPTIMIZERS},
    "lora, merged in the block": functools.partial(lora, is_merged_in_block=True),
    "lora, merged after the block": functools.partial(lora, is_merged_in_block=False),
    "ema of before the block": functools.partial(ema_copies, is_before=True),
    "ema of the block": functools.partial(ema_copies, is_before=False),
    "swa": swa,
    "checkpointed": functools.partial(checkpointed, is_reentrant=False),
    "checkpointed, reentrant": functools.partial(checkpointed, is_reentrant=True),
}


def all_programs() -> dict[str, Any]:
    """Run the programs one after the other."""
    return {name: program() for name, program in PROGRAMS.items()}


@functools.cache
def outcomes_in(world: str) -> dict[str, Any]:
    """Return what each program returns on rank 0."""
    outcomes: dict[str, Any] = distributed(**WORLDS[world])(all_programs)()
    return outcomes


@pytest.mark.parametrize("world", ["fsdp", "hsdp"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_trains_what_one_process_trains(name: str, world: str) -> None:
    """Weights, optimizer state, averages and what they predict are those of one process."""
    expected, outcome = outcomes_in("one process")[name], outcomes_in(world)[name]
    torch.testing.assert_close(outcome, expected, rtol=1e-6, atol=1e-6)
