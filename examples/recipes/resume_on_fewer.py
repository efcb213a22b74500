"""Begin on two devices, stop in the middle of an epoch, and go on with one device from the last checkpoint.

With `batch="global"` a step uses the same samples on any number of devices, so the learning rate stays right.
The weights at the end are those of an uninterrupted run, up to rounding.
"""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from parallelize import checkpoints, distributed, parallel_model, shard_loader, world_size


@distributed(gpus="auto", processes=2, seed=0)
def train(model, dataset, folder, epochs, stop_at=None):
    loader = shard_loader(DataLoader(dataset, batch_size=64, shuffle=True), batch="global")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    with parallel_model(model), checkpoints(folder, every=10, **state) as saved:
        print(f"{world_size()} device(s) begin after step {saved.steps}")
        for _ in range(loader.epoch, epochs):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                saved.step()
                if saved.steps == stop_at:
                    return


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))


x = torch.rand(1024, 2, generator=torch.Generator().manual_seed(1)) - 0.5
dataset = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
# Usually this is another machine, and you start the same program on it.
one_device = {"gpus": 1, "processes": None} if torch.cuda.is_available() else {"processes": 1}

with tempfile.TemporaryDirectory() as folder:
    uninterrupted = make_model()
    train(uninterrupted, dataset, f"{folder}/uninterrupted", epochs=10)

    train(make_model(), dataset, f"{folder}/resumed", epochs=10, stop_at=57)
    model = make_model()
    train.options(**one_device)(model, dataset, f"{folder}/resumed", epochs=10)

uninterrupted.cpu()
model.cpu()  # a call that uses a single GPU leaves the model on it

with torch.no_grad():
    accuracy = (model(x).argmax(dim=1) == dataset.tensors[1]).float().mean().item()
weights, expected = (nn.utils.parameters_to_vector(m.parameters()) for m in (model, uninterrupted))
print(f"weights differ by {(weights - expected).abs().max().item():.1e}, accuracy {accuracy:.3f}")
