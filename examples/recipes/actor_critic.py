"""Train an actor and a critic by PPO: two models, two optimizers, and no dataset.

Each process balances its own poles, with its own random numbers, and so collects its own experience.
Gradients are averaged over the processes. A number that decides whether to go on has to be equal on all of them.
"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from parallelize import all_reduce, device, distributed, parallel_model


class Poles:
    """Many poles to balance at a time: push a pole to the left or to the right, before it falls."""

    def __init__(self, count):
        self.state = 0.1 * torch.randn(count, 2, device=device())  # angle and speed of each pole

    def push(self, to_the_right):
        """Push each pole, replace those that have fallen, and return which have fallen."""
        angle, speed = self.state.unbind(dim=1)
        speed = speed + 0.05 * (10 * angle + torch.where(to_the_right, 6.0, -6.0))
        angle = angle + 0.05 * speed
        has_fallen = angle.abs() > 0.5
        upright = 0.1 * torch.randn_like(self.state)
        self.state = torch.where(has_fallen.unsqueeze(1), upright, torch.stack([angle, speed], dim=1))
        return has_fallen


@torch.no_grad()
def play(actor, critic, poles, steps):
    """Return states, actions, their log probabilities and returns, each for (steps, poles), and the number of falls."""
    states, actions, log_probabilities, falls = [], [], [], []
    for _ in range(steps):
        policy = Categorical(logits=actor(poles.state))
        action = policy.sample()
        states.append(poles.state)
        actions.append(action)
        log_probabilities.append(policy.log_prob(action))
        falls.append(poles.push(to_the_right=action == 1).float())
    future = critic(poles.state).squeeze(dim=1)
    returns = []
    for has_fallen in reversed(falls):
        future = (1 - has_fallen) * (1 + 0.95 * future)  # a reward of 1 for each step that a pole stands
        returns.insert(0, future)
    experience = map(torch.stack, (states, actions, log_probabilities, returns))
    return *experience, torch.stack(falls).sum()


@distributed(gpus="auto", processes=2, seed=0)
def train(actor, critic, rounds):
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    falls_by_round = []
    with parallel_model(actor, critic):
        poles = Poles(count=64)  # in the block, each process draws other random numbers
        for _ in range(rounds):
            states, actions, old_log_probabilities, returns, falls = play(actor, critic, poles, steps=32)
            falls_by_round.append(all_reduce(falls, "mean").item())
            for _ in range(8):
                values = critic(states).squeeze(dim=2)
                critic_loss = F.mse_loss(values, returns)
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()

                policy = Categorical(logits=actor(states))
                log_ratio = policy.log_prob(actions) - old_log_probabilities
                ratio = log_ratio.exp()
                advantage = returns - values.detach()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                actor_optimizer.zero_grad()
                (-gain.mean()).backward()
                actor_optimizer.step()

                distance = (ratio - 1 - log_ratio).mean().detach()  # between the old policy and the new one
                if all_reduce(distance, "mean") > 0.02:
                    break
    return falls_by_round


torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
falls = train(actor, critic, rounds=40)
print(f"falls of 64 poles in 32 steps: {falls[0]:.1f} in the first round, {falls[-1]:.1f} in the last")
