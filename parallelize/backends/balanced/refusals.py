"""What this backend will not run, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallelize.errors import ConfigError

__all__ = [
    "another_model",
    "carrier",
    "changed_view",
    "compiled",
    "cut_wrongly",
    "double_backward",
    "escaped",
    "inner_gradient",
    "no_batch",
    "not_a_tensor",
    "not_sample_by_sample",
    "one_value",
    "other_weights",
    "packed_sequence",
    "second_backward",
    "stateful",
    "too_large",
    "uneven_outputs",
    "uneven_shapes",
    "unjoinable",
    "unsupported",
]

_WHOLE = "use BalancedBackend(microbatches=1), which runs each batch whole, or backend='ddp'"
_NO_CACHE = "train a language model of Hugging Face with model.config.use_cache = False"


def no_batch(dim: int) -> ConfigError:
    """No argument has a batch dimension."""
    return ConfigError(
        f"no argument of the model has a dimension {dim}",
        why="a batch is cut into micro-batches along its batch dimension",
        fix="pass the batch as tensors, in containers if you like; name its dimension: BalancedBackend(batch_dim=1)",
    )


def one_value(channels: int) -> ConfigError:
    """Batch norm in training, on a micro-batch with one value per channel."""
    return ConfigError(
        f"batch norm over {channels} channels sees one value per channel in a micro-batch",
        why="its variance is not defined: micro-batches are normalised by themselves",
        fix="use larger batches or fewer micro-batches, BalancedBackend(batch_norm='full'), or group norm",
    )


def packed_sequence() -> ConfigError:
    """A PackedSequence among the inputs."""
    return ConfigError(
        "a PackedSequence among the model's inputs",
        why="its samples are interleaved, so it cannot be cut into micro-batches",
        fix="pass the padded tensor with its lengths, pack inside forward and unpack with total_length=, or use "
        "backend='ddp'",
    )


def carrier(name: str, kind: str, what: str) -> ConfigError:
    """An object among the inputs that micro-batches cannot share."""
    return ConfigError(
        f"argument {name} of the model, a {kind}, {what}",
        why="such an object cannot be cut: micro-batches, which run at the same time, would all use this one",
        fix="pass tensors, in containers if you like; call the model under torch.no_grad(), where such a batch runs "
        f"whole; {_NO_CACHE}; or {_WHOLE}",
    )


def not_a_tensor(position: int, kind: str) -> ConfigError:
    """An object among the outputs, another one in each micro-batch."""
    return ConfigError(
        f"output {position} of the model is a {kind}",
        why="nothing says how those of the micro-batches make one of the whole batch",
        fix=f"return tensors, in containers if you like; {_NO_CACHE}; or {_WHOLE}",
    )


def uneven_outputs(counts: Sequence[int]) -> ConfigError:
    """Micro-batches that return different structures."""
    return ConfigError(
        f"micro-batches return {' and '.join(map(str, sorted(set(counts))))} values",
        why="outputs of different structure cannot be joined to those of one batch",
        fix=_WHOLE,
    )


def cut_wrongly(dimensions: Mapping[str, int], error: Exception) -> ConfigError:
    """A forward that fails on a part of a batch, and not on the whole."""
    listed = ", ".join(f"{name} along dimension {dim}" for name, dim in list(dimensions.items())[:4])
    more = f" and {len(dimensions) - 4} more" if len(dimensions) > 4 else ""
    return ConfigError(
        f"forward fails on a part of the batch ({type(error).__name__}), not on the whole; cut were arguments "
        f"{listed}{more}",
        why="what is as long as the first tensor is taken for samples, whatever it is (lists of samples cannot be told "
        "from other lists); and a part lacks what forward may need of all samples",
        fix="pass samples as one tensor, and what is not per sample in another shape; name the batch dimension: "
        f"BalancedBackend(batch_dim=...); write no batch size into forward; or {_WHOLE}",
    )


def uneven_shapes(position: int, shapes: Sequence[tuple[int, ...]]) -> ConfigError:
    """An output that follows the number of samples, and is of another length in another micro-batch besides."""
    return ConfigError(
        f"output {position} of the model: tensors of {' and '.join(map(str, dict.fromkeys(shapes)))}",
        why="micro-batches differ in another dimension than that of the samples, so that they cannot be joined",
        fix="pad to a length that does not depend on the samples, as pad_packed_sequence(total_length=) does; or "
        f"{_WHOLE}",
    )


def unjoinable(position: int, what: str) -> ConfigError:
    """An output that is neither per sample nor the same for all."""
    return ConfigError(
        f"output {position} of the model: {what}",
        why="it differs between micro-batches and no dimension of it follows the number of samples, so that nothing "
        "says what it is for the whole batch",
        fix=f"return it per sample, or as a mean over samples (a scalar); or {_WHOLE}",
    )


def changed_view(shape: tuple[int, ...]) -> ConfigError:
    """A tensor whose view was changed in place on another stage."""
    return ConfigError(
        f"a tensor of {shape} shares memory with one that another stage has changed in place",
        why="stages work on copies of each other's tensors, and the change did not reach this one",
        fix="write y = f(x) instead of changing a view in place; or use BalancedBackend(plan=...) with another cut, or "
        "backend='ddp'",
    )


def double_backward() -> ConfigError:
    """create_graph=True."""
    return ConfigError(
        "backward(create_graph=True), or grad(create_graph=True), through a model under backend='balanced'",
        why="its backward runs in pieces, in threads of the stages, and leaves no graph that could be differentiated",
        fix="compute what needs second derivatives (a gradient penalty) outside of the block, or use backend='ddp'",
    )


def second_backward() -> ConfigError:
    """Another backward through the same forward."""
    return ConfigError(
        "a second backward through one forward of a model under backend='balanced'",
        why="the first one has run through all stages and has freed what they kept, retain_graph=True or not",
        fix="add the losses and call backward once on the sum, or call the model again",
    )


def escaped() -> ConfigError:
    """A gradient for a tensor that a hook has taken out of a micro-batch."""
    return ConfigError(
        "a loss on a tensor from inside a model under backend='balanced', which a hook, or forward, has put elsewhere",
        why="it belongs to one micro-batch on one stage, whose backward runs there, and the model's gradients would "
        "not have its part",
        fix="let forward return it, and compute the loss on what the model returns; or detach it, or use backend='ddp'",
    )


def inner_gradient() -> ConfigError:
    """torch.autograd.grad, or backward, inside forward."""
    return ConfigError(
        "forward differentiates (torch.autograd.grad, or backward) by an argument, a parameter, or a tensor from "
        "another submodule",
        why="its graph is in pieces, one per stage, and a gradient would have the last piece only",
        fix="let forward return what is differentiated, and call torch.autograd.grad on the model's output; or use "
        "backend='ddp'",
    )


def other_weights(shape: tuple[int, ...]) -> ConfigError:
    """Recomputing finds other parameters than forward did."""
    return ConfigError(
        f"what is computed again in backward uses a parameter of {shape} that forward has not used",
        why="parameters that are replaced for one call, by torch.func.functional_call, are the old ones in backward",
        fix="use BalancedBackend(recompute=False) and no checkpoint inside the model, or call backward before the "
        "parameters are put back",
    )


def stateful(names: Sequence[str]) -> ConfigError:
    """Forward leaves something on the model."""
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return ConfigError(
        f"forward changes {listed} of the model",
        why="several micro-batches are in the model at the same time, and would read what another one has left there",
        fix=f"pass such values as arguments and results of modules; or {_WHOLE}",
    )


def not_sample_by_sample(position: int, difference: float) -> ConfigError:
    """Outputs of micro-batches that are not those of the batch."""
    return ConfigError(
        f"output {position} of the model, computed in micro-batches, differs from that of the whole batch by "
        f"{difference:.3g}",
        why="the model mixes samples of a batch, takes an argument apart that is not per sample but as long as the "
        "batch, or its loss is no mean over samples",
        fix=f"compute such a loss outside of the model, name the batch dimension in BalancedBackend(batch_dim=...); or "
        f"{_WHOLE}",
    )


def too_large(needed_bytes: float, devices: Sequence[str], *, is_measured: bool) -> ConfigError:
    """No partition fits; unless the model has run, only what its parameters need is known."""
    what = "its best division" if is_measured else "even without activations, its best division"
    return ConfigError(
        f"the model does not fit on {', '.join(devices)}",
        why=f"{what} needs {needed_bytes / 2**20:.1f} MiB ({needed_bytes:.0f} bytes) on every device",
        fix="use more or larger devices or a smaller batch, raise memory=, or keep less: "
        "BalancedBackend(recompute='auto', optimizer_state=...)",
    )


def another_model(expected: str, given: str) -> ConfigError:
    """A plan that was made for other parameters or devices."""
    return ConfigError(
        f"plan= is for {expected}, and this is {given}",
        why="a plan names the submodules and devices of the model that it was made for",
        fix="leave plan= out to measure again, then save parallelize.plan(model)",
    )


def compiled(name: str) -> ConfigError:
    """torch.compile around or inside the model."""
    return ConfigError(
        f"{name or 'the model'} is compiled",
        why="a compiled graph does not tell when it uses a tensor of another stage",
        fix="pass the plain model, or use backend='ddp', which runs compiled models",
    )


def unsupported(name: str, kind: str) -> ConfigError:
    """A module that is parallel, or scripted, itself."""
    return ConfigError(
        f"{name or 'the model'} is a {kind}",
        why="it brings threads, processes or a graph of its own, which cannot be divided over stages",
        fix="use the plain module in its place, or backend='ddp'",
    )
