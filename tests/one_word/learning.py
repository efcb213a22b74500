"""Programs of other kinds: reinforcement learning, meta-learning, graphs, several tasks."""

from __future__ import annotations

import torch
from one_word.data import batches, graph, images, weights
from torch import nn, optim
from torch.distributions import Categorical
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import parallel_model, rank, shard_loader

__all__ = ["PROGRAMS"]


class Corridor:
    """An environment of 4 numbers, in which the sign of the first is to be held against a drift."""

    def __init__(self, seed, lanes=()):
        self.generator = torch.Generator().manual_seed(seed)
        self.lanes = lanes

    def reset(self):
        self.state = torch.randn(*self.lanes, 4, dtype=torch.float64, generator=self.generator)
        return self.state

    def step(self, action):
        noise = torch.randn(*self.lanes, 4, dtype=torch.float64, generator=self.generator)
        push = (torch.as_tensor(action, dtype=torch.float64) * 2 - 1)[..., None]
        self.state = 0.9 * self.state + 0.3 * push + 0.1 * noise
        return self.state, -self.state[..., 0].abs()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.action_head = nn.Linear(16, 2)
        self.value_head = nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def actor_critic():
    """One forward per step of an episode, one backward per episode."""
    torch.manual_seed(543)
    env = Corridor(543 + rank())
    model = Policy().double()
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    with parallel_model(model):
        for _ in range(4):
            state, saved_actions, rewards = env.reset(), [], []
            for _ in range(6):
                probs, state_value = model(state)
                m = Categorical(probs)
                action = m.sample()
                saved_actions.append((m.log_prob(action), state_value))
                state, reward = env.step(action.item())
                rewards.append(reward)
            R, returns = 0.0, []
            for r in rewards[::-1]:
                R = r + 0.99 * R
                returns.insert(0, R)
            returns = torch.stack(returns)
            returns = (returns - returns.mean()) / (returns.std() + 1e-8)
            policy_losses, value_losses = [], []
            for (log_prob, value), R in zip(saved_actions, returns, strict=True):
                advantage = R - value.item()
                policy_losses.append(-log_prob * advantage)
                value_losses.append(F.smooth_l1_loss(value, R[None]))
            optimizer.zero_grad()
            loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
            loss.backward()
            optimizer.step()
    return weights(model=model)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo():
    """CleanRL's loop: rollouts without gradients and updates, both through methods of the agent."""
    torch.manual_seed(1)
    envs = Corridor(1 + rank(), lanes=(4,))
    agent = Agent().double()
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    num_steps, clip_coef = 6, 0.2
    with parallel_model(agent, methods=["get_value", "get_action_and_value"]):
        next_obs = envs.reset()
        for iteration in range(2):
            optimizer.param_groups[0]["lr"] = (1.0 - iteration / 2) * 2.5e-3
            obs, actions, logprobs, rewards, values = [], [], [], [], []
            for _ in range(num_steps):
                obs.append(next_obs)
                with torch.no_grad():
                    action, logprob, _, value = agent.get_action_and_value(next_obs)
                    values.append(value.flatten())
                actions.append(action)
                logprobs.append(logprob)
                next_obs, reward = envs.step(action)
                rewards.append(reward)
            with torch.no_grad():
                next_value = agent.get_value(next_obs).flatten()
            advantages, lastgaelam = [], 0
            for t in reversed(range(num_steps)):
                following = next_value if t == num_steps - 1 else values[t + 1]
                lastgaelam = rewards[t] + 0.99 * following - values[t] + 0.99 * 0.95 * lastgaelam
                advantages.insert(0, lastgaelam)
            b_obs, b_actions, b_logprobs = torch.cat(obs), torch.cat(actions), torch.cat(logprobs)
            b_advantages, b_values = torch.cat(advantages), torch.cat(values)
            b_returns = b_advantages + b_values
            for _ in range(2):
                b_inds = torch.randperm(len(b_obs))
                for start in range(0, len(b_obs), 12):
                    mb = b_inds[start : start + 12]
                    _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
                    ratio = (newlogprob - b_logprobs[mb]).exp()
                    adv = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
                    pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)).mean()
                    v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
                    loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
    return weights(agent=agent)


def dqn():
    """A target network outside of the block, into which the weights are copied, softly, at every step."""
    torch.manual_seed(70)
    env = Corridor(70 + rank(), lanes=(8,))
    q_network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    target_network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = optim.AdamW(q_network.parameters(), lr=1e-2, amsgrad=True)
    with parallel_model(q_network):
        obs = env.reset()
        for step in range(6):
            actions = torch.arange(8) % 2
            next_obs, rewards = env.step(actions)
            with torch.no_grad():
                target_max, _ = target_network(next_obs).max(dim=1)
                td_target = rewards + 0.99 * target_max
            old_val = q_network(obs).gather(1, actions[:, None]).squeeze()
            loss = F.smooth_l1_loss(old_val, td_target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(q_network.parameters(), 100)
            optimizer.step()
            if step % 2:
                for target_param, q_param in zip(target_network.parameters(), q_network.parameters(), strict=True):
                    target_param.data.copy_(0.1 * q_param.data + 0.9 * target_param.data)
            else:
                target_state, state = target_network.state_dict(), q_network.state_dict()
                for key in state:
                    target_state[key] = state[key] * 0.05 + target_state[key] * 0.95
                target_network.load_state_dict(target_state)
            obs = next_obs
    return weights(q_network=q_network, target_network=target_network)


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        return self.net(x)


def sine_tasks(count=32):
    generator = torch.Generator().manual_seed(5)
    phase = torch.rand(count, 1, 1, generator=generator, dtype=torch.float64) * 3
    x = torch.rand(count, 8, 1, generator=generator, dtype=torch.float64) * 4 - 2
    return TensorDataset(x, torch.sin(x + phase))


def maml():
    """Second-order MAML: fast weights by autograd.grad, used through functional_call."""
    torch.manual_seed(71)
    model = Sine().double()
    meta_optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with parallel_model(model):
        for x, y in shard_loader(DataLoader(sine_tasks(), batch_size=2)):
            meta_optimizer.zero_grad()
            outer_loss = 0.0
            for task_x, task_y in zip(x, y, strict=True):
                fast = dict(model.named_parameters())
                for _ in range(2):
                    inner_loss = F.mse_loss(functional_call(model, fast, (task_x[:4],)), task_y[:4])
                    grads = torch.autograd.grad(inner_loss, tuple(fast.values()), create_graph=True)
                    fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
                outer_loss = outer_loss + F.mse_loss(functional_call(model, fast, (task_x[4:],)), task_y[4:])
            (outer_loss / len(x)).backward()
            meta_optimizer.step()
    return weights(model=model)


def reptile():
    """Weights taken by state_dict, trained on a task, and moved part of the way."""
    torch.manual_seed(72)
    model = Sine().double()
    with parallel_model(model):
        for x, y in shard_loader(DataLoader(sine_tasks(), batch_size=4)):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            inner = optim.SGD(model.parameters(), lr=0.05)
            for _ in range(2):
                inner.zero_grad()
                F.mse_loss(model(x), y).backward()
                inner.step()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(before[name] + 0.3 * (p - before[name]))
    return weights(model=model)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(6, 12), nn.Linear(12, 2)

    def propagate(self, x, edge_index):
        row, col = edge_index
        degree = torch.zeros(len(x), dtype=x.dtype).scatter_add_(0, col, torch.ones(len(col), dtype=x.dtype))
        norm = degree.clamp(min=1).pow(-0.5)
        messages = x[row] * (norm[row] * norm[col])[:, None]
        return torch.zeros_like(x).index_add(0, col, messages)

    def forward(self, x, edge_index):
        x = F.relu(self.propagate(self.lin1(x), edge_index))
        return self.propagate(self.lin2(x), edge_index)


def gcn():
    """The whole graph in each forward; batches are training nodes."""
    torch.manual_seed(73)
    x, edge_index, y = graph()
    model = GCN().double()
    optimizer = optim.Adam(
        [{"params": model.lin1.parameters(), "weight_decay": 5e-4}, {"params": model.lin2.parameters()}], lr=1e-2
    )
    with parallel_model(model):
        for _ in range(2):
            for (nodes,) in shard_loader(DataLoader(TensorDataset(torch.arange(16)), batch_size=4)):
                model.train()
                optimizer.zero_grad()
                out = model(x, edge_index)
                loss = F.cross_entropy(out[nodes], y[nodes])
                loss.backward()
                optimizer.step()
    return weights(model=model)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(64, 24)
        self.classes, self.brightness = nn.Linear(24, 10), nn.Linear(24, 1)

    def forward(self, x):
        h = F.relu(self.trunk(x.flatten(1)))
        return self.classes(h), self.brightness(h).squeeze(1)


class UncertaintyLoss(nn.Module):
    def __init__(self, tasks=2):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(tasks))

    def forward(self, *losses):
        return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_vars, losses, strict=True))


def uncertainty_weights():
    torch.manual_seed(74)
    model, weighting = TwoHeads().double(), UncertaintyLoss().double()
    optimizer = optim.Adam([*model.parameters(), *weighting.parameters()], lr=5e-3)
    with parallel_model(model, weighting):
        for x, y in shard_loader(batches(images())):
            logits, brightness = model(x)
            loss = weighting(F.cross_entropy(logits, y), F.mse_loss(brightness, x.mean(dim=(1, 2, 3))))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model=model, weighting=weighting)


def gradient_surgery():
    """PCGrad: a gradient per task, with conflicting parts projected away, written into .grad."""
    torch.manual_seed(75)
    model = TwoHeads().double()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with parallel_model(model):
        for x, y in shard_loader(batches(images())):
            grads = []
            for task in range(2):
                optimizer.zero_grad()
                logits, brightness = model(x)
                losses = (F.cross_entropy(logits, y), F.mse_loss(brightness, x.mean(dim=(1, 2, 3))))
                (losses[task] + 0.0 * losses[1 - task]).backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            dot = sum((a * b).sum() for a, b in zip(*grads, strict=True))
            squared = sum((b * b).sum() for b in grads[1])
            for p, a, b in zip(model.parameters(), *grads, strict=True):
                p.grad = a + b - (dot.clamp(max=0) / (squared + 1e-12)) * b
            optimizer.step()
    return weights(model=model)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x.flatten(1)))


def tied_autoencoder():
    """An encoder and a classifier as two models that share the encoder, trained by turns."""
    torch.manual_seed(76)
    autoencoder = Autoencoder().double()
    classifier = nn.Sequential(nn.Flatten(), autoencoder.encoder, nn.Linear(4, 10)).double()
    optimizer_ae = optim.Adam(autoencoder.parameters(), lr=3e-3)
    optimizer_c = optim.SGD(classifier.parameters(), lr=0.05)
    with parallel_model(autoencoder, classifier):
        for x, y in shard_loader(batches(images())):
            optimizer_ae.zero_grad()
            F.mse_loss(autoencoder(x), x.flatten(1)).backward()
            optimizer_ae.step()
            optimizer_c.zero_grad()
            F.cross_entropy(classifier(x), y).backward()
            optimizer_c.step()
    return weights(autoencoder=autoencoder, classifier=classifier)


PROGRAMS = [
    actor_critic,
    ppo,
    dqn,
    maml,
    reptile,
    gcn,
    uncertainty_weights,
    gradient_surgery,
    tied_autoencoder,
]
