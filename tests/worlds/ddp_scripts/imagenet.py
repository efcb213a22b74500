"""After the PyTorch imagenet example: argparse, --dist-url env://, DistributedSampler, all_reduce of meters."""

# ruff: noqa: PTH118 - as published

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.backends import cudnn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--dist-url", default="env://", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)


def main():
    args = parser.parse_args()
    cudnn.benchmark = True
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1
    main_worker(args)


def main_worker(args):
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        dist.init_process_group(
            backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )
    torch.manual_seed(args.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    args.batch_size = int(args.batch_size / args.world_size)
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(22, 3, 8, 8, generator=generator), torch.randint(5, (22,), generator=generator))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, num_workers=1)
    val_sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
    val_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=val_sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer)
        accuracy = validate(val_loader, model)
        scheduler.step()
    torch.save({"model": model.state_dict(), "accuracy": accuracy}, os.path.join(args.data, f"{args.rank}.pt"))


def train(loader, model, criterion, optimizer):
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for images, target in loader:
            right = (model(images).argmax(1) == target).sum().item()
            total += torch.tensor([right, len(target)])
    dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    main()
