"""Refuses options of a block that contradict each other, or that its models do not support."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parallelize.block.models import LeafTensor
from parallelize.block.tensor_parallel import is_tensor_parallel
from parallelize.errors import ConfigError
from parallelize.gradients.averaging import Average
from parallelize.plugins.base import Amp
from parallelize.run.context import Runtime, active_or
from parallelize.torch_patches.module_tensors import all_named_parameters


def refuse_contradictions(
    run: Runtime,
    models: Sequence[nn.Module],
    *,
    average: Average,
    buffers: str | None,
) -> None:
    """Refuse options that do not support each other, or the models.

    parallel_model calls this before it changes a model.

    Args:
        run: the run in this process, with the options of the run.
        models: the models of the block.
        average: how gradients of the ranks are averaged.
        buffers: the user's `buffers=`; None: the user has not chosen.

    Raises:
        ConfigError: two options, or an option and a model, contradict each other.
    """
    _refuse_apex(run, average)
    _refuse_for_logical(run, models, average)
    _refuse_shared(run, models)
    _refuse_for_tensor_parallel(run, models)
    if buffers == "mean" and run.config.wrap is not None:
        raise ConfigError(
            "buffers='mean' with wrap=",
            why="its module broadcasts rank 0's buffers",
            fix="drop buffers=, or use backend='ddp'",
        )


def _refuse_apex(run: Runtime, average: Average) -> None:
    is_apex = run.config.amp is not None and run.config.amp_engine.name == "apex"
    if is_apex and average != "ranks":
        raise ConfigError(
            f"average={average!r} with amp_engine='apex'",
            why="Apex has copied the averaged gradients to its master parameters before they could "
            "be weighted",
            fix="use amp_engine='native'",
        )


def _refuse_for_logical(run: Runtime, models: Sequence[nn.Module], average: Average) -> None:
    """Refuse, under `logical=`, gradients that cannot be divided into parts of a batch."""
    if not run.config.logical:
        return
    if average != "ranks":
        contradiction = f"average={average!r}"
    elif any(isinstance(model, LeafTensor) for model in models):
        contradiction = "a tensor that is trained beside the models"
    else:
        return
    raise ConfigError(
        f"logical={run.config.logical} with {contradiction}",
        why="only the gradients of means over samples, through a model's forward, are divided into "
        "parts",
        fix="use losses that are means over samples, and parameters of a module",
    )


def _refuse_for_tensor_parallel(run: Runtime, models: Sequence[nn.Module]) -> None:
    """Refuse, for a model that is tensor parallel already, options that need whole parameters."""
    if not any(map(is_tensor_parallel, models)):
        return
    config = run.config
    amp: Amp | None = config.amp
    option = None
    if config.wrap is not None:
        option = "wrap="
    elif config.logical:
        option = f"logical={config.logical}"
    elif amp is not None and config.amp_engine.name != "native":
        option = f"amp_engine={config.amp_engine.name!r}"
    elif amp is not None and amp.level in {"O2", "O3"}:
        option = f"amp level {amp.level}"
    elif active_or(run).data_ranks.size > 1 and not config.backend.takes_tensor_parallel:
        option = f"backend={config.backend.name!r}"
    if option is not None:
        raise ConfigError(
            f"{option} with a model that is tensor parallel already",
            why="its parameters are DTensors, of which each rank holds a part, and the option "
            "needs whole parameters",
            fix="use backend='ddp', with amp='bf16' or no amp",
        )


def _refuse_shared(run: Runtime, models: Sequence[nn.Module]) -> None:
    """Refuse a parameter that two models share, if each model shards or casts its parameters."""
    option = _option_per_model(run)
    if option is None:
        return
    # id of a parameter -> the first model that has it, and the parameter's name there
    first_owners: dict[int, tuple[nn.Module, str]] = {}
    for model in models:
        for name, parameter in all_named_parameters(model):
            model_and_name = (model, f"{name} of {type(model).__name__}")
            owner, text = first_owners.setdefault(id(parameter), model_and_name)
            if owner is not model:
                raise ConfigError(
                    f"{text}, which another model of the block shares, with {option}",
                    why="each model shards or casts its own parameters",
                    fix="put the models into one nn.Module, pass that, and name its methods in "
                    "methods=[...]",
                )


def _option_per_model(run: Runtime) -> str | None:
    """Return the text of an option by which each model shards or casts its parameters, or None."""
    backend = run.config.backend
    if backend.shards_gradients and run.world.world_size > 1:
        return f"backend={backend.name!r}"
    amp: Amp | None = run.config.amp
    if amp is None:
        return None
    if amp.level in {"O2", "O3"}:
        return f"amp level {amp.level}"
    if run.config.amp_engine.name != "native":
        return f"amp_engine={run.config.amp_engine.name!r}"
    return None
