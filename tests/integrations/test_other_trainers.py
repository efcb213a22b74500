"""Programs of other libraries, and of torch's DistributedDataParallel, run unedited in a decorated function.

Each divides its data and averages its gradients by itself: two processes train what one process trains with batches of
both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from parallelize import distributed, rank

pytestmark = pytest.mark.slow

PER_PROCESS, PROCESSES, EPOCHS, RATE = 4, 2, 2, 0.1


def dataset() -> Dataset[Any]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def with_ddp() -> tuple[str, nn.Module]:
    dist.init_process_group("gloo")
    sampler = DistributedSampler(dataset(), shuffle=False)
    loader = DataLoader(dataset(), batch_size=PER_PROCESS, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
    return type(model).__name__, model.module


def with_accelerate() -> tuple[str, nn.Module]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, loader = net(), DataLoader(dataset(), batch_size=PER_PROCESS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return type(model).__name__, accelerator.unwrap_model(model)


def with_fabric() -> tuple[str, nn.Module]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=PROCESSES, strategy="ddp")
    fabric.launch()
    plain = net()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=PER_PROCESS))
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.mse_loss(model(x), y))
            optimizer.step()
    return type(model._forward_module).__name__, model.module


def with_lightning() -> tuple[str, nn.Module]:
    import pytorch_lightning

    class Lit(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            self.wrapper = type(self.trainer.strategy.model).__name__
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,  # that of the Trainer shuffles in training
    )
    lit = Lit()
    sampler = DistributedSampler(dataset(), num_replicas=PROCESSES, rank=rank(), shuffle=False)
    trainer.fit(lit, DataLoader(dataset(), batch_size=PER_PROCESS, sampler=sampler))
    return lit.wrapper, lit.net


class NetWithLoss(nn.Module):
    """The net in a module that returns its loss, as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.net(x)
        return {"loss": F.mse_loss(prediction, labels), "prediction": prediction}


def with_trainer(folder: str) -> tuple[str, nn.Module]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=PER_PROCESS,
        num_train_epochs=EPOCHS,
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = NetWithLoss()
    rows = [{"x": x, "labels": y} for x, y in dataset()]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return type(trainer.model_wrapped).__name__, model.net


def check(program: Callable[..., tuple[str, nn.Module]], *arguments: str) -> None:
    """Check that both ranks of a program train a DistributedDataParallel to the weights of one process."""
    expected = net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for x, y in DataLoader(dataset(), batch_size=PER_PROCESS * PROCESSES):
            optimizer.zero_grad()
            F.mse_loss(expected(x), y).backward()
            optimizer.step()
    for wrapper, model in distributed(processes=PROCESSES)(program).all_ranks(*arguments):
        assert wrapper == "DistributedDataParallel"
        torch.testing.assert_close(model.state_dict(), expected.state_dict())


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def test_a_script_of_ddp_trains_as_written() -> None:
    """A script that initializes its group, and wraps its model itself, trains the weights of one process."""
    check(with_ddp)


@needs("accelerate")
def test_accelerate_trains_as_written() -> None:
    """An Accelerator finds the processes of the call, divides its loader and wraps the model in DDP."""
    check(with_accelerate)


@needs("lightning_fabric")
@pytest.mark.filterwarnings("default:torch.distributed.nn.functional.*:FutureWarning")
def test_fabric_trains_as_written() -> None:
    """`Fabric.launch` starts no processes, and joins those of the call."""
    check(with_fabric)


@needs("pytorch_lightning")
@pytest.mark.filterwarnings("default")  # its own warnings, which depend on the machine
def test_a_trainer_of_lightning_trains_as_written() -> None:
    """A Trainer finds the processes of the call, and wraps the module in DDP."""
    check(with_lightning)


@needs("accelerate", "transformers")
def test_a_trainer_of_transformers_trains_as_written(tmp_path) -> None:
    """A Trainer finds the processes of the call, divides its data and wraps the model in DDP."""
    check(with_trainer, str(tmp_path))


CELLS = (
    """
import torch
import torch.distributed as dist
from torch import nn
from parallelize import distributed

class Net(nn.Linear):
    pass
""",
    """
@distributed(processes=2)
def train(rows):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(Net(2, 1, bias=False))
    nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(rows[dist.get_rank()]).sum().backward()
    optimizer.step()
    return model.module
""",
    """
model = train(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
type(model) is Net, model.weight.tolist()
""",
)


def test_a_cell_of_a_notebook_trains_with_ddp(tmp_path) -> None:
    """A cell with DDP, called from another cell, returns the trained model of a class of the notebook."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [
        output.data["text/plain"] for output in notebook.cells[2].outputs if output.output_type == "execute_result"
    ]
    assert results == ["(True, [[-1.0, -3.0]])"]
