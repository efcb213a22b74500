"""Programs with optimizers beyond Adam and SGD, and with optimizers made or wrapped in other ways."""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict

import numpy as np
import torch
from one_word.data import batches, images, weights
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, ReduceLROnPlateau

from parallelize import all_reduce, load, no_sync, parallel_model, save, shard_loader, world_size

__all__ = ["PROGRAMS"]


class MLP(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.fc1 = nn.Linear(64, width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.gelu(self.fc1(x.flatten(1)))
        return self.head(F.gelu(self.fc2(x)))


class SAM(optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        shared_device = self.param_groups[0]["params"][0].device
        return torch.norm(
            torch.stack(
                [
                    p.grad.norm(p=2).to(shared_device)
                    for group in self.param_groups
                    for p in group["params"]
                    if p.grad is not None
                ]
            ),
            p=2,
        )


def sam():
    torch.manual_seed(50)
    model = MLP().double()
    optimizer = SAM(model.parameters(), optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            F.cross_entropy(model(x), y).backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.second_step(zero_grad=True)
    return weights(model=model)


class Lookahead(optim.Optimizer):
    def __init__(self, optimizer, k=3, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        self.fast_state = self.optimizer.state
        self.defaults = optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0

    def update(self, group):
        for fast in group["params"]:
            param_state = self.state[fast]
            if "slow_param" not in param_state:
                param_state["slow_param"] = torch.zeros_like(fast.data)
                param_state["slow_param"].copy_(fast.data)
            slow = param_state["slow_param"]
            slow += (fast.data - slow) * self.alpha
            fast.data.copy_(slow)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                self.update(group)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def lookahead():
    torch.manual_seed(51)
    model = MLP().double()
    optimizer = Lookahead(optim.RAdam(model.parameters(), lr=1e-2))
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model=model)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, x, future=0):
        outputs = []
        h_t, c_t = torch.zeros(x.size(0), 8, dtype=x.dtype), torch.zeros(x.size(0), 8, dtype=x.dtype)
        h_t2, c_t2 = torch.zeros_like(h_t), torch.zeros_like(c_t)
        for input_t in x.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def time_sequence():
    """LBFGS on the whole data set, with predictions of the future after each step."""
    np.random.seed(0)
    torch.manual_seed(0)
    start = np.random.randint(-80, 80, (32, 1))
    data = torch.from_numpy(np.sin((np.arange(24) + start) / 1.0 / 4).astype("float64"))
    loader = torch.utils.data.DataLoader(data, batch_size=len(data) // world_size())
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=5)
    predictions = []
    with parallel_model(seq):
        for _ in range(3):
            for text in shard_loader(loader):
                x, target = text[:, :-1], text[:, 1:]

                def closure(x=x, target=target):
                    optimizer.zero_grad()
                    loss = criterion(seq(x), target)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                with torch.no_grad():
                    predictions.append(seq(data[:2, :-1], future=3)[:, -3:])
    return {**weights(seq=seq), "predictions": torch.cat(predictions)}


def lbfgs_line_search():
    torch.manual_seed(52)
    model = MLP(8).double()
    optimizer = optim.LBFGS(model.parameters(), lr=1, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
    with parallel_model(model):
        for step, (x, y) in enumerate(shard_loader(batches(images(), batch_size=32))):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
            if step == 3:
                break
    return weights(model=model)


def muon_of_torch():
    torch.manual_seed(53)
    model = MLP().double()
    matrices = [model.fc1.weight, model.fc2.weight]
    others = [p for name, p in model.named_parameters() if name not in {"fc1.weight", "fc2.weight"}]
    muon, adamw = optim.Muon(matrices, lr=0.02), optim.AdamW(others, lr=3e-3)
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            F.cross_entropy(model(x), y).backward()
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
    return weights(model=model)


def zeropower_via_newtonschulz5(G, steps=5):
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G
    if G.size(-2) > G.size(-1):
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(-2) > G.size(-1):
        X = X.mT
    return X


def muon_update(grad, momentum, beta=0.95, nesterov=True):
    momentum.lerp_(grad, 1 - beta)
    update = grad.lerp_(momentum, beta) if nesterov else momentum
    if update.ndim == 4:
        update = update.view(len(update), -1)
    update = zeropower_via_newtonschulz5(update)
    update *= max(1, grad.size(-2) / grad.size(-1)) ** 0.5
    return update


class SingleDeviceMuon(optim.Optimizer):
    def __init__(self, params, lr=0.02, weight_decay=0, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if len(state) == 0:
                    state["momentum_buffer"] = torch.zeros_like(p)
                update = muon_update(p.grad, state["momentum_buffer"], beta=group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"])


def muon_by_hand():
    torch.manual_seed(54)
    model = MLP().double()
    hidden = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [SingleDeviceMuon(hidden, lr=0.02, weight_decay=0.01), optim.AdamW(rest, lr=3e-3)]
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            F.cross_entropy(model(x), y).backward()
            for opt in optimizers:
                opt.step()
            model.zero_grad(set_to_none=True)
    return weights(model=model)


class Shampoo(optim.Optimizer):
    """Preconditioners of both sides of each matrix, after pytorch-optimizer's class."""

    def __init__(self, params, lr=0.1, momentum=0.9, epsilon=1e-4):
        super().__init__(params, {"lr": lr, "momentum": momentum, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad.data, self.state[p]
                order = grad.ndimension()
                original_size = grad.size()
                if len(state) == 0:
                    state["momentum_buffer"] = grad.clone()
                    for dim_id, dim in enumerate(grad.size()):
                        state[f"precond_{dim_id}"] = group["epsilon"] * torch.eye(dim, dtype=grad.dtype)
                grad.mul_(1 - group["momentum"]).add_(state["momentum_buffer"], alpha=group["momentum"])
                for dim_id, dim in enumerate(grad.size()):
                    precond = state[f"precond_{dim_id}"]
                    grad = grad.transpose(0, dim_id).contiguous()
                    transposed_size = grad.size()
                    grad = grad.view(dim, -1)
                    precond.add_(grad @ grad.t())
                    values, vectors = torch.linalg.eigh(precond)
                    inv_precond = vectors @ torch.diag(values.clamp_min(1e-6).pow(-1 / (2 * order))) @ vectors.t()
                    grad = (inv_precond @ grad).view(transposed_size).transpose(0, dim_id).contiguous()
                state["momentum_buffer"] = grad.view(original_size)
                p.data.add_(grad.view(original_size), alpha=-group["lr"])


def shampoo():
    torch.manual_seed(55)
    model = MLP(12).double()
    optimizer = Shampoo(model.parameters())
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model=model)


def adafactor():
    torch.manual_seed(56)
    model = MLP().double()
    optimizer = optim.Adafactor(model.parameters(), lr=1e-2)
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model=model)


class Lamb(optim.Optimizer):
    """Adam with a trust ratio per layer, from the norms of the whole weight and update."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                exp_avg.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                adam_step = exp_avg / exp_avg_sq.sqrt().add(group["eps"])
                adam_step.add_(p.data, alpha=group["weight_decay"])
                weight_norm = p.data.pow(2).sum().sqrt().clamp(0, 10)
                adam_norm = adam_step.pow(2).sum().sqrt()
                trust_ratio = 1 if weight_norm == 0 or adam_norm == 0 else weight_norm / adam_norm
                p.data.add_(adam_step * (-group["lr"] * trust_ratio))


def lamb():
    torch.manual_seed(57)
    model = MLP().double()
    optimizer = Lamb(model.parameters())
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model=model)


def accumulation():
    """Four accumulated batches per step, the gradient clipped, warm restarts."""
    torch.manual_seed(58)
    model = MLP()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=2)
    accum_iter = 4
    with parallel_model(model):
        for batch_idx, (x, y) in enumerate(shard_loader(batches(images(dtype=torch.float32)))):
            if (batch_idx + 1) % accum_iter:
                with no_sync(model):
                    (F.cross_entropy(model(x), y) / accum_iter).backward()
            else:
                (F.cross_entropy(model(x), y) / accum_iter).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return weights(model=model)


def accumulation_everywhere():
    """Accumulated without no_sync: every backward averages."""
    torch.manual_seed(59)
    model = MLP().double()
    optimizer = optim.NAdam(model.parameters(), lr=5e-3)
    with parallel_model(model):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(shard_loader(batches(images()))):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if (i + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model=model)


def plateau():
    torch.manual_seed(60)
    model = MLP().double()
    optimizer = optim.Adagrad(model.parameters(), lr=0.05)
    scheduler = ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=0)
    with parallel_model(model):
        for _ in range(3):
            total = 0.0
            for x, y in shard_loader(batches(images())):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total += loss.item()
            scheduler.step(float(all_reduce(torch.tensor(total, dtype=torch.float64), "mean")))
    return {**weights(model=model), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def rebuilt_optimizer():
    """A factory in the block, a second optimizer with the first one's state halfway."""
    torch.manual_seed(61)
    model = MLP().double()
    make = functools.partial(optim.Adam, lr=5e-3, amsgrad=True)
    with parallel_model(model):
        optimizer = make(model.parameters())
        for step, (x, y) in enumerate(shard_loader(batches(images()))):
            if step == 2:
                state = optimizer.state_dict()
                optimizer = make(model.parameters())
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model=model)


def saved_in_the_block():
    """`save` and `load` of this package, in the middle of the block."""
    torch.manual_seed(62)
    model = MLP().double()
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    loader = batches(images())
    with tempfile.TemporaryDirectory() as folder, parallel_model(model):
        folders = [folder]
        torch.distributed.broadcast_object_list(folders)
        path = f"{folders[0]}/last.pt"
        for epoch in range(2):
            for x, y in shard_loader(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if epoch == 0:
                save(path, model=model, optimizer=optimizer)
        load(path, model=model, optimizer=optimizer)
        for x, y in shard_loader(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model=model)


def adaptive_clipping():
    """Unit-wise gradient clipping (AGC), written into the gradients in place."""
    torch.manual_seed(63)
    model = MLP().double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def unitwise_norm(x):
        return x.norm(2) if x.ndim <= 1 else x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)

    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                max_norm = unitwise_norm(p.detach()).clamp_(min=1e-3).mul_(0.1)
                grad_norm = unitwise_norm(p.grad.detach())
                clipped = p.grad.detach() * (max_norm / grad_norm.clamp(min=1e-6))
                p.grad.detach().copy_(torch.where(grad_norm < max_norm, p.grad.detach(), clipped))
            optimizer.step()
    return weights(model=model)


def weight_penalty():
    """An L1 penalty on the weights, added to the loss, and decay by hand after the step."""
    torch.manual_seed(64)
    model = MLP().double()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            l1 = sum(p.abs().sum() for p in model.parameters())
            loss = F.cross_entropy(model(x), y) + 1e-3 * l1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - 1e-3)
    return weights(model=model)


PROGRAMS = [
    sam,
    lookahead,
    time_sequence,
    lbfgs_line_search,
    muon_of_torch,
    muon_by_hand,
    shampoo,
    adafactor,
    lamb,
    accumulation,
    accumulation_everywhere,
    plateau,
    rebuilt_optimizer,
    saved_in_the_block,
    adaptive_clipping,
    weight_penalty,
]
