"""Train a small GPT in bf16 on a text that ships with Python: the language's own documentation.

`python 03_gpt.py 30` trains longer and generates better text.
"""

import sys
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import parallelize
from parallelize import distributed, parallel_model, shard_loader

CONTEXT = 64  # context length in characters


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # B T D: batch, tokens, width
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, width=64, heads=4, layers=2):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):  # B T -> B T V
        x = self.characters(ids) + self.places[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model, window):  # B T+1
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@distributed(gpus="auto", processes=2, amp="bf16", seed=0)
def train(model, windows, unseen, epochs):
    loader = DataLoader(windows, batch_size=16, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with parallel_model(model):
        for _ in range(epochs):
            for x in shard_loader(loader, limit=100, progress=True):
                loss = loss_of(model, x)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

        model.eval()
        with torch.no_grad():
            test_loader = DataLoader(unseen, batch_size=64)
            losses = torch.stack([loss_of(model, x) for x in shard_loader(test_loader)])
    return parallelize.all_reduce(losses.mean(), "mean").item()


def continued(model, ids, length):
    """Extend a text by sampling from the model."""
    for _ in range(length):
        likely = model(ids[None, -CONTEXT:])[0, -1].div(0.7).softmax(dim=0)
        ids = torch.cat([ids, torch.multinomial(likely, 1)])
    return ids


text = "".join(topics[name] for name in sorted(topics))  # about 460,000 characters
characters = sorted(set(text))
number = {character: each for each, character in enumerate(characters)}
ids = torch.tensor([number[character] for character in text])
windows = ids.unfold(0, CONTEXT + 1, CONTEXT)
is_unseen = torch.arange(len(windows)) % 20 == 0

model = GPT(len(characters))
frequency = torch.bincount(ids) / len(ids)
guessed = -(frequency * frequency.log()).sum()
epochs = int(sys.argv[1]) if sys.argv[1:] else 1
loss = train(model, windows[~is_unseen], windows[is_unseen], epochs)

model.cpu().eval()
with torch.no_grad():
    start = torch.tensor([number[character] for character in "The statement "])
    print("".join(characters[each] for each in continued(model, start, length=120)))
print(f"unseen text, in nats a character: by frequency alone {guessed:.2f}, by the model {loss:.2f}")
