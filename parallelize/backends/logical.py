"""`logical=`: each batch has the same parts, and the weights the same bits, at any world size.

    logical=4, two processes      process 0             process 1
    a batch of all                part 0   part 1       part 2   part 3
    forward                       one part after another, each with random numbers of its own
    gradient of a parameter      (  g0   +   g1  )  +  (  g2   +   g3  )    one tree, in and over
                                                                            the processes

A part computes with aliases of the parameters. Autograd adds the gradients of two aliases, and of
two of these sums: the sum of two numbers has the same bits in either order. The reducer goes on
with the tree over the processes. What a loss multiplies the gradients of a part by, 1/samples of
the process, differs by a power of two.

Glossary:

    part        some samples of a batch; all processes together have `logical` parts of it
    division    how a process divides the batch of one forward into parts
    alias       a view of a parameter, with which one part computes
    stream      the random numbers of one part
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from typing_extensions import override

from parallelize.backends.batches import Batch, joined_parts
from parallelize.backends.ddp_engine import DDPOptions
from parallelize.backends.dp_engine import count_of_samples
from parallelize.backends.logical_checks import LogicalChecks
from parallelize.backends.model_state import ModelState
from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import has_sparse_gradient
from parallelize.plugins.base import Arguments, Inner, Session
from parallelize.run.context import Runtime, current
from parallelize.run.generators import RNGState, derive_seed, global_generators
from parallelize.torch_patches.arithmetic import deterministic_kernels
from parallelize.torch_patches.backward import Order, Pass, Run, subscribed
from parallelize.torch_patches.forward import SplitAtBuckets
from parallelize.torch_patches.transforms import refuse_transform


class PartsOfBlock:
    """What the parts of a block's models share.

    Args:
        run: the run in this process.

    Attributes:
        run: as given.
        checks: warn of what has no parts.
        aliases: model -> name of a parameter -> its alias for each part of this process, for the
            forwards up to the next backward pass.
    """

    def __init__(self, run: Runtime) -> None:
        self.run = run
        self.checks = LogicalChecks(run)
        self.aliases: dict[nn.Module, dict[str, list[torch.Tensor]]] = {}

    def backward(self, backward_pass: Pass, run: Run) -> None:
        """Run a backward pass; a subscriber of torch_patches.backward."""
        self.aliases.clear()
        self.checks.before_backward(backward_pass.roots)
        run(backward_pass)


@contextlib.contextmanager
def same_bits(run: Runtime) -> Iterator[PartsOfBlock | None]:
    """Compute in the context so that the bits do not depend on the number of processes.

    Kernels are deterministic, and torch warns by name of those that have no deterministic variant.
    Each process has the number of threads that `logical` processes on this machine could have.

    Args:
        run: the run in this process.

    Yields:
        What the models of the block share; None without `logical=`.
    """
    if run.config.logical is None:
        yield None
        return
    threads = max((os.cpu_count() or 1) // run.config.logical, 1)
    parts = PartsOfBlock(run)
    with deterministic_kernels(threads), subscribed(Order.RECORD, parts.backward):
        yield parts


@dataclass(frozen=True)
class _Division:
    """How the batch of one forward is divided.

    Args:
        sizes: number of samples of each part.
        first_stream: number of the random numbers of the first part.
    """

    sizes: Sequence[int]
    first_stream: int


class Parts(nn.Module):
    """Runs the forward of a model part by part, and joins the outputs.

    Args:
        inner: calls the user's forward.
        parts: what the models of the block share.
        options: of the backend.

    Raises:
        ConfigError: the model's gradients, or the block's options, have other bits at another
            number of processes.
    """

    def __init__(self, inner: Inner, parts: PartsOfBlock, options: DDPOptions) -> None:
        super().__init__()
        run = parts.run
        world = current().world
        assert run.config.logical is not None
        _refuse_options(run, inner, options)
        self._run = run
        self._shared = parts
        self._inner = inner
        self._parts_of_process = run.config.logical // world.world_size
        self._first_part = world.rank * self._parts_of_process
        # Drawn by the latest forward with gradients, and the number of forwards since then.
        self._drawn_number = 0
        self._forwards_since = 0
        self._has_recorded = False
        self._split = SplitAtBuckets(options.reduction(inner).bucket_bytes)
        # Autocast keeps a copy in half precision of a leaf, to which all gradients of the leaf go.
        # It keeps none of an alias. So a single part computes with an alias, too, as several do.
        has_amp = type(inner.session) is not Session
        self._has_aliases = self._parts_of_process > 1 or has_amp
        parts.checks.add(inner.model)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of this process's parts of a batch, and return their joined outputs."""
        refuse_transform(
            "logical= divides each batch into parts, and a transform hides how many samples there "
            "are",
            fix="drop logical=, or transform only what is computed outside of the model's forward",
        )
        inputs: Arguments = (args, kwargs)
        is_recorded = torch.is_grad_enabled()
        division = self._division(inputs, is_recorded=is_recorded)
        checks = self._shared.checks
        if is_recorded:
            checks.before_forward()
            # All processes draw the same number.
            self._drawn_number = int(torch.randint(2**62, (), device="cpu").item())
            self._forwards_since = 0
        self._forwards_since += 1
        is_first = is_recorded and not self._has_recorded
        self._has_recorded = self._has_recorded or is_recorded
        generators = RNGState(self._run.devices)
        try:
            output = self._run_parts(inputs, division, is_first=is_first)
        finally:
            generators.restore()
        if not is_recorded:
            checks.after_evaluation()
            return output
        checks.after_forward(generators)
        checks.note_outputs(output, inputs=inputs, first_rows=division.sizes[0])
        return output

    def _run_parts(self, inputs: Arguments, division: _Division, *, is_first: bool) -> Any:
        """Return the joined outputs of all parts.

        Args:
            inputs: the arguments of the model.
            division: how they are divided.
            is_first: whether the first part runs again, to compare its bits.
        """
        batch = Batch.of_rows(inputs, sum(division.sizes))
        parts = batch.parts(division.sizes)
        if len(parts) > 1:
            parts = [batch.in_own_memory(part) for part in parts]
        # Each part begins with the same buffers. The first part writes to those of the model, which
        # stay, as rank 0's do under ddp.
        copies_of_buffers = [self._copied_buffers() for _ in parts[1:]]
        buffers_of_check = self._copied_buffers() if is_first else {}
        outputs = [self._run_part(0, parts[0], {}, division)]
        for number, buffers in enumerate(copies_of_buffers, start=1):
            outputs.append(self._run_part(number, parts[number], buffers, division))
        if is_first:
            # What the model keeps, such as a number of calls, is as if no part ran again.
            state = ModelState(self._inner.model, self._run.devices)
            try:
                output_again = self._run_part(0, parts[0], buffers_of_check, division)
            finally:
                state.restore()
            self._shared.checks.compare_again(outputs[0], output_again)
        if len(outputs) == 1:
            return outputs[0]
        return joined_parts(outputs, division.sizes)

    def _run_part(
        self,
        number: int,
        part: Arguments,
        buffers: dict[str, torch.Tensor],
        division: _Division,
    ) -> Any:
        """Run the forward of one part.

        Args:
            number: number of the part in this process.
            part: its inputs.
            buffers: what the part computes with in place of the model's buffers, by name.
            division: how the batch is divided.
        """
        stream = division.first_stream + number
        seed = derive_seed(self._drawn_number, self._forwards_since, stream)
        for generator in global_generators(self._run.devices).values():
            generator.seed(seed)
        tensors = dict(buffers)
        if self._has_aliases and torch.is_grad_enabled():
            for name, aliases in self._aliases().items():
                tensors[name] = aliases[number]
        args, kwargs = part
        with self._split:
            if tensors:
                return functional_call(self._inner, tensors, args, kwargs)
            return self._inner(*args, **kwargs)

    def _copied_buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the model's buffers, by name."""
        return {name: buffer.clone() for name, buffer in self._inner.named_buffers()}

    def _aliases(self) -> dict[str, list[torch.Tensor]]:
        """Return the aliases of each trained parameter, by its name.

        All forwards up to the next backward pass share them, as they share the parameters in a
        process with one part.
        """
        aliases_by_name = self._shared.aliases.setdefault(self, {})
        if not aliases_by_name:
            for name, parameter in self._inner.named_parameters():
                if parameter.requires_grad:
                    alias = parameter.view_as(parameter)
                    aliases_by_name[name] = _aliases_in_tree(alias, self._parts_of_process)
        return aliases_by_name

    def _division(self, inputs: Arguments, *, is_recorded: bool) -> _Division:
        """Return how the batch of a forward is divided, by the number of its samples.

            a batch of a sharded loader       as the loader has divided it
            an evaluation, of as many         as those processes divide it: so it has the same bits
            samples as such a batch has at    at any number of processes
            another number of processes
            an evaluation of other batches    not at all

        Raises:
            ConfigError: gradients are recorded, and the batch is not one of a loader, or has parts
                of unequal sizes.
        """
        samples = count_of_samples(inputs) or 0
        latest = current().loaders.parts_by_loader.values()
        of_this_size = [parts for parts in latest if sum(parts.sizes) == samples]
        if is_recorded and not of_this_size:
            sizes = [str(sum(parts.sizes)) for parts in latest]
            raise self._undivided_error(
                samples,
                why=f"the batches of shard_loader have {' or '.join(sizes) or 'none'} in this "
                "process",
                fix="call the model with a whole batch of shard_loader, of tensors with the batch "
                "dimension first",
            )
        if is_recorded and not all(parts.are_equal for parts in of_this_size):
            raise self._undivided_error(
                samples,
                why="its parts have unequal numbers of samples",
                fix="use tail='pad' or 'drop'",
            )
        if of_this_size and samples:
            sizes_of_parts = [size for size in of_this_size[-1].sizes if size]
            return _Division(sizes_of_parts, self._first_part)
        for parts in latest:
            count = self._count_of_equal_parts(samples, parts.first_size)
            if count > 1:
                return _Division([parts.first_size] * count, first_stream=0)
        return _Division([samples], first_stream=0)

    def _count_of_equal_parts(self, samples: int, size: int) -> int:
        """Return how many parts a process may have of a batch; 1: none has it in parts."""
        assert self._run.config.logical is not None
        count = self._run.config.logical
        while count > 1 and count * size != samples:
            count //= 2
        return count

    def _undivided_error(self, samples: int, *, why: str, fix: str) -> ConfigError:
        """Return the error for a forward with gradients whose batch cannot be divided."""
        model_name = type(self._inner.model).__name__
        return ConfigError(
            f"logical={self._run.config.logical} with a forward of {model_name} whose inputs have "
            f"{samples or 'no'} samples",
            why=why,
            fix=fix,
        )


def _refuse_options(run: Runtime, inner: Inner, options: DDPOptions) -> None:
    """Raise a ConfigError for gradients and options by which the bits would differ."""
    has_sparse_gradients = any(map(has_sparse_gradient, inner.modules()))
    # Loss scaling and casts of weights need the marks of outputs; autocast alone does not.
    is_cast_or_scaled = inner.session.mark_owner is not None
    faults = (
        (has_sparse_gradients, "an embedding of sparse gradients", "use sparse=False"),
        (inner.buffer_source == "mean", "buffers='mean'", "drop buffers="),
        (not options.broadcast_buffers, "broadcast_buffers=False", "drop it"),
        (
            options.reduction(inner).dtype is not None,
            "gradients that are sent in another dtype",
            "drop comm_hook=",
        ),
        (is_cast_or_scaled, "amp in fp16, or of level O2 or O3", "use amp='bf16'"),
    )
    for is_fault, option, fix in faults:
        if is_fault:
            raise ConfigError(
                f"logical={run.config.logical} with {option}",
                why="the bits would depend on the number of processes",
                fix=fix,
            )


def _aliases_in_tree(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return aliases of a tensor, whose gradients autograd adds by pairs.

    Args:
        tensor: itself an alias.
        count: number of aliases, a power of two.
    """
    if count == 1:
        return [tensor]
    first_half = _aliases_in_tree(tensor.view_as(tensor), count // 2)
    return first_half + _aliases_in_tree(tensor.view_as(tensor), count // 2)
