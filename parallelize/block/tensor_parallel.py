"""Models that are tensor parallel already: which ranks hold one model, and which the same parts.

torch's `parallelize_module`, and libraries such as transformers, make DTensors of parameters. Each
of the ranks in the mesh of a DTensor holds a part of it, and they make each forward together. The
block takes such a model as it is, and averages gradients over the other ranks:

    world of 4 ranks, meshes of 2       rank 0   rank 1   rank 2   rank 3
    ranks that hold one model           ---- model ----   ---- model ----
    part of the model                   first    second   first    second
    ranks that hold the same part       0 and 2, 1 and 3: the data ranks, see run/data_ranks.py

torch makes sure that the gradients of parameters that are no DTensors are equal on the ranks that
hold one model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from parallelize.agreement.gather import gather_objects
from parallelize.errors import ConfigError
from parallelize.run.context import Runtime
from parallelize.run.data_ranks import DataRanks, all_ranks, divided_world
from parallelize.torch_patches.module_tensors import (
    all_named_buffers,
    all_named_parameters,
    is_dtensor,
)

_Ranks = tuple[int, ...]


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether some parameter or buffer of a model is a DTensor."""
    return next(_named_dtensors(model), None) is not None


def set_data_ranks(run: Runtime, models: Sequence[nn.Module], *, is_outermost: bool) -> None:
    """Set the data ranks of a run by the models of a block that begins.

    It is a collective if a model is tensor parallel.

    Args:
        run: the active run, which has the loaders.
        models: the models of the block.
        is_outermost: whether the block is in no other one. An inner block has the data ranks of the
            outer one: the loop that reads the data goes on.

    Raises:
        ConfigError: the meshes of the models do not divide the world, or an inner block would
            change the data ranks.
    """
    ranks_of_model = _ranks_of_model(models)
    if ranks_of_model is None:
        if is_outermost:
            run.state.data_ranks = None
        return
    data_ranks = all_ranks(run.world)
    if run.world.world_size > 1:
        data_ranks = _data_ranks(run, gather_objects(ranks_of_model))
    if not is_outermost and data_ranks != run.data_ranks:
        raise ConfigError(
            "parallel_model of a tensor parallel model inside a parallel_model block of other "
            "models",
            why="the ranks that hold one model read the same batches, and the outer block divides "
            "batches otherwise",
            fix="use one block for both: with parallel_model(first, second)",
        )
    run.state.data_ranks = data_ranks


def _ranks_of_model(models: Sequence[nn.Module]) -> _Ranks | None:
    """Return the ranks that hold the models together; None: no model is tensor parallel.

    Raises:
        ConfigError: tensors of the models are on several meshes.
    """
    first_name, ranks = "", None
    for model in models:
        for name, tensor in _named_dtensors(model):
            ranks_of_tensor = tuple(tensor.device_mesh.mesh.flatten().tolist())
            if ranks is None:
                first_name, ranks = name, ranks_of_tensor
            if ranks_of_tensor != ranks:
                raise ConfigError(
                    f"{name} on the ranks {_listed(ranks_of_tensor)}, and {first_name} on the "
                    f"ranks {_listed(ranks)}",
                    why="the models of a block are held by the same ranks, which read the same "
                    "batches",
                    fix="parallelize all modules over one mesh",
                )
    return ranks


def _data_ranks(run: Runtime, ranks_of_models: Sequence[_Ranks]) -> DataRanks:
    """Return the data ranks of a world of tensor parallel models.

    Args:
        run: the run in this process.
        ranks_of_models: for each rank of the world, the ranks that hold its model.

    Raises:
        ConfigError: the models do not divide the ranks of the world.
    """
    size = len(ranks_of_models[0])
    for rank, ranks in enumerate(ranks_of_models):
        is_held_alike = all(ranks_of_models[member] == ranks for member in ranks)
        if rank not in ranks or len(ranks) != size or not is_held_alike:
            world_size = run.world.world_size
            raise ConfigError(
                f"a tensor parallel model on the ranks {_listed(ranks)}, as rank {rank} of "
                f"{world_size} has it",
                why="each rank has to hold a part of one model, and all models have equally many "
                "parts",
                fix="make one mesh of all ranks, and parallelize over its last dimension: "
                f"init_device_mesh(device, ({world_size} // parts, parts), "
                "mesh_dim_names=('dp', 'tp'))['tp']",
            )
    models = sorted(set(ranks_of_models))
    groups = tuple(zip(*models, strict=True))
    return divided_world(run.world, groups)


def _listed(ranks: _Ranks) -> str:
    return ", ".join(map(str, ranks))


def _named_dtensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the DTensors of a model, with what an error calls them."""
    named_tensors: list[tuple[str, torch.Tensor]] = [
        *all_named_parameters(model),
        *all_named_buffers(model),
    ]
    for name, tensor in named_tensors:
        if is_dtensor(tensor):
            yield f"{name} of {type(model).__name__}", tensor
