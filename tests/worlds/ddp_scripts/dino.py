"""After DINO: utils.init_distributed_mode, a print for rank 0 only, a center averaged over ranks."""

# ruff: noqa: A001, PTH118 - as published

import argparse
import builtins
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup_for_distributed(is_master):
    builtin_print = builtins.print

    def print(*args, **kwargs):
        force = kwargs.pop("force", False)
        if is_master or force:
            builtin_print(*args, **kwargs)

    builtins.print = print


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank = int(os.environ["RANK"])
        args.world_size = int(os.environ["WORLD_SIZE"])
        args.gpu = int(os.environ["LOCAL_RANK"])
    else:
        print("Does not support training without distributed environment.")
        sys.exit(1)
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(args.gpu)
    print(f"| distributed init (rank {args.rank}): {args.dist_url}", flush=True)
    dist.barrier()
    setup_for_distributed(args.rank == 0)


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


class DINOLoss(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach()
        loss = torch.sum(-teacher_out * F.log_softmax(student_output / 0.1, dim=-1), dim=-1).mean()
        self.update_center(teacher_output)
        return loss

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * 0.9 + batch_center * 0.1


def train_dino(args):
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    teacher = copy.deepcopy(student)
    student = nn.parallel.DistributedDataParallel(student)
    teacher.load_state_dict(student.module.state_dict())
    for p in teacher.parameters():
        p.requires_grad = False
    dino_loss = DINOLoss(4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.0005 * get_world_size())
    dataset = TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(2)))
    sampler = DistributedSampler(dataset, shuffle=True)
    data_loader = DataLoader(dataset, sampler=sampler, batch_size=3, drop_last=True)
    for epoch in range(2):
        data_loader.sampler.set_epoch(epoch)
        for (images,) in data_loader:
            noise = torch.randn_like(images)
            loss = dino_loss(student(images + 0.1 * noise), teacher(images))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for q, k in zip(student.module.parameters(), teacher.parameters(), strict=True):
                    k.data.mul_(0.99).add_(0.01 * q.detach().data)
        dist.barrier()
        print(f"epoch {epoch} of {dist.get_world_size()} processes")
    state = {"student": student.state_dict(), "teacher": teacher.state_dict(), "center": dino_loss.center}
    torch.save(state, os.path.join(args.output_dir, f"{args.rank}.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("DINO")
    parser.add_argument("output_dir")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--dist_url", default="env://", type=str)
    train_dino(parser.parse_args())
