"""A module of global state, as legacy code has it; `legacy_training` reaches it by its name."""

from __future__ import annotations

import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
history: list[float] = []
