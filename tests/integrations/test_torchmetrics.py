"""torchmetrics synchronizes its metrics over the processes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from parallelize import distributed, shard_loader

pytestmark = pytest.mark.slow

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

SAMPLES = 13  # 4 and 3 batches of 2 in two processes


def make_metric(kind: str):
    metrics = torchmetrics.classification
    return {
        "accuracy": lambda: metrics.MulticlassAccuracy(num_classes=3, average="micro"),
        "AUROC": metrics.BinaryAUROC,  # keeps all inputs: lists of different lengths
    }[kind]()


def data(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    if kind == "AUROC":
        return TensorDataset(torch.rand(SAMPLES, generator=generator), torch.arange(SAMPLES) % 2)
    return TensorDataset(torch.randint(3, (SAMPLES,), generator=generator), torch.arange(SAMPLES) % 3)


@distributed(processes=2)
def evaluate(kind: str, tail: str) -> tuple[float, int]:
    metric, seen = make_metric(kind), 0
    for predicted, target in shard_loader(DataLoader(data(kind), batch_size=2), tail=tail):
        metric.update(predicted, target)
        seen += len(target)
    return metric.compute().item(), seen


@pytest.mark.parametrize("kind", ["accuracy", "AUROC"])
def test_every_rank_has_the_value_of_all_data(kind: str) -> None:
    """With tail="exact" each sample counts once, although one process has more samples."""
    metric = make_metric(kind)
    metric.update(*data(kind).tensors)
    ranks = evaluate.all_ranks(kind, "exact")
    assert [seen for _, seen in ranks] == [7, 6]
    assert [value for value, _ in ranks] == pytest.approx([metric.compute().item()] * 2)
