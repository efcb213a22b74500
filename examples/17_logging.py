"""Log, save and evaluate in a loop that runs on every rank; `tensorboard --logdir runs` shows the curves."""

import logging
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from parallelize import all_reduce, distributed, is_main, parallel_model, save, shard_loader

log = logging.getLogger("digits")


@distributed(gpus="auto", processes=2)
def train(model, train_set, test_set, epochs, folder):
    loader = shard_loader(DataLoader(train_set, batch_size=32, shuffle=True))
    test_loader = shard_loader(DataLoader(test_set, batch_size=50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer = SummaryWriter(folder) if is_main() else None  # one file of events, not one per rank
    best = 0.0
    with parallel_model(model):
        for epoch in range(epochs):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            mean_loss = all_reduce(loss.detach(), "mean").item()  # `loss` is that of this rank's samples

            model.eval()
            with torch.no_grad():  # each sample once, on one of the ranks
                right = [(model(x).argmax(dim=1) == y).float().mean() for x, y in test_loader]
            accuracy = test_loader.mean(right)  # over all samples: the number of one process, on every rank

            log.info("epoch %d: loss %.3f, accuracy %.3f", epoch, mean_loss, accuracy)
            if writer is not None:
                writer.add_scalar("loss", mean_loss, epoch)
                writer.add_scalar("accuracy", accuracy, epoch)
            if accuracy > best:  # on all ranks alike, since `accuracy` is
                best = accuracy
                save(f"{folder}/best.safetensors", model=model)  # every rank calls it, one file is written
    if writer is not None:
        writer.close()
    return best


if __name__ == "__main__":
    # Rank 0's records are handled here: handlers, files and levels are those of this program.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train_set, test_set = TensorDataset(images[357:], labels[357:]), TensorDataset(images[:357], labels[:357])
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/digits"
    print(f"best accuracy {train(network, train_set, test_set, epochs=10, folder=folder):.3f}")
