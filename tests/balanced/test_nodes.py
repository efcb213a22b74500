"""One pipeline on each of two nodes: gradients are averaged over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from balanced.models import Gpt, loss_of, seeded
from ranks import outputs_of_ranks

# Each process is a separate node, as under torchrun.
SCRIPT = """
import sys
from pathlib import Path

import torch
from balanced.models import CASES, Gpt, batch_of, loss_of, plan_for, seeded

from parallelize import no_sync, parallel_model, rank
from parallelize.backends.balanced.plan import plan
from parallelize.backends.balanced.plugin import BalancedBackend

torch.set_num_threads(1)
inputs = batch_of(CASES["gpt, tied"])
first, second = (part.chunk(2)[rank()] for part in (inputs[0][0], inputs[0][0].flip(1)))
found = {}
for name, options in {
    "measured": {},
    "given, small buckets": {"plan": plan_for(seeded(Gpt), inputs), "bucket_cap_mb": 0.05},
    "unused looked for": {"plan": plan_for(seeded(Gpt), inputs), "find_unused_parameters": True},
    "undivided": {"microbatches": "auto"},
}.items():
    model = seeded(Gpt)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backend = BalancedBackend(**{"devices": ("cpu", "cpu"), "microbatches": 4, **options})
    with parallel_model(model, backend=backend):
        if rank() == 0:
            with torch.no_grad():
                model(first)  # one rank alone may evaluate before there is a plan
        with no_sync(model):
            loss_of(model(first)).backward()
        alone = model.norm.weight.grad.clone()
        loss_of(model(second)).backward()
        gradient = {key: each.grad.clone() for key, each in model.named_parameters()}
        optimizer.step()
        if rank() == 0:
            with torch.no_grad():
                model(first)  # and after
    found[name] = {"alone": alone, "gradient": gradient, "weights": model.state_dict(), "plan": str(plan(model))}
torch.save(found, Path(sys.argv[1]) / f"{rank()}.pt")
"""


def run_nodes(folder: Path) -> list[dict[str, Any]]:
    (folder / "script.py").write_text(SCRIPT)
    outputs_of_ranks(folder / "script.py", folder)
    return [torch.load(folder / f"{node}.pt") for node in range(2)]


@pytest.mark.slow
def test_two_nodes_train_one_model(tmp_path: Path) -> None:
    """Accumulated under no_sync and averaged over two pipelines, gradients equal one process's; all use one plan."""
    ranks = run_nodes(tmp_path)
    torch.manual_seed(1)
    x = torch.randint(11, (8, 8))
    model = seeded(Gpt)
    sum(loss_of(model(each)) for batch in (x, x.flip(1)) for each in batch.chunk(2)).div(2).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in ranks[0]:
        first, second = (found[name] for found in ranks)
        assert first["plan"] == second["plan"], name
        assert not torch.equal(first["alone"], second["alone"]), name
        for key, gradient in first["gradient"].items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4, msg=lambda t, k=key: f"{k}: {t}")
            assert torch.equal(gradient, second["gradient"][key]), f"{name}: {key}"
            assert torch.equal(first["weights"][key], second["weights"][key]), f"{name}: {key}"
