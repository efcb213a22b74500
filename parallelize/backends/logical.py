"""`logical=`: batches in the same parts at any number of processes, so that the weights get the same bits.

    logical=4, two processes      process 0             process 1
    a batch of all                part 0   part 1       part 2   part 3
    forward                       one part after another, each with random numbers of its own
    gradient of a parameter      (  g0   +   g1  )  +  (  g2   +   g3  )     one tree, in and over processes

A part computes with aliases of the parameters. Autograd adds the gradients of two aliases, and of two of these sums:
the sum of two numbers has the same bits in either order. The reducer goes on with the tree over the processes. What a
loss multiplies the gradients of a part by, 1/samples of the process, differs by a power of two.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from typing_extensions import override

from parallelize.backends.ddp_engine import DDPOptions
from parallelize.errors import ConfigError
from parallelize.gradients.autograd_graph import has_sparse_gradient, mark_outputs, marks_of, node_of, nodes_behind
from parallelize.gradients.target_counts import loss_counts
from parallelize.plugins.base import Inner, Session
from parallelize.run.containers import leaves, map_leaves, with_leaves
from parallelize.run.context import Runtime, current
from parallelize.run.generators import RNGState, derive_seed, global_generators
from parallelize.run.user_line import user_stacklevel
from parallelize.torch_patches.arithmetic import deterministic_kernels
from parallelize.torch_patches.backward import Order, Pass, Roots, Run, subscribed
from parallelize.torch_patches.forward import SplitAtBuckets
from parallelize.torch_patches.module_tensors import all_named_parameters
from parallelize.torch_patches.transforms import refuse_transform

__all__ = ["Parts", "PartsOfBlock", "same_bits"]


class PartsOfBlock:
    """What the parts of a block's models share; it looks at the first backward passes for what has no parts."""

    def __init__(self, run: Runtime) -> None:
        self.run, self.what = run, f"logical={run.config.logical}"
        # Model -> name of a parameter -> its aliases, for the forwards up to the next backward pass.
        self.aliases: dict[nn.Module, dict[str, list[torch.Tensor]]] = {}
        self.looks, self.forwards = 2, 8  # that are left to look at; a GAN has two losses
        self.names: dict[int, str] = {}  # of parameters, by id
        self.outputs: list[tuple[torch.Tensor, int]] = []  # with the number of samples of the first part
        self.generators: RNGState | None = None  # after the latest forward
        self.passes = 0  # of loaders, which draw an order, at the latest forward

    def backward(self, each: Pass, run: Run) -> None:
        """Run a backward pass; a subscriber of torch_patches.backward."""
        self.aliases.clear()
        if self.looks:
            self._look(each.roots)
        self.outputs.clear()
        run(each)

    def _look(self, roots: Roots) -> None:
        nodes = list(nodes_behind(map(node_of, roots), owner=self))
        if not any(self in marks_of(node) for node in nodes):
            return
        self.looks -= 1
        direct = [name for node in nodes if (name := self.names.get(id(getattr(node, "variable", None))))]
        sums = [each.operation for each in loss_counts(roots) if each.count is None]
        if direct:
            self.warn(f"{direct[0]} is used outside of a forward")
        elif sums:
            self.warn(f"the loss is a {sums[0]}, and no mean over samples")
        elif self._mixes(roots):
            self.warn("the loss compares samples of a batch with each other")

    def _mixes(self, roots: Roots) -> bool:
        """Whether the gradient of the first part's outputs depends on the outputs of others."""
        tensors = [each for each, _ in self.outputs]
        losses = [each for each in roots if isinstance(each, torch.Tensor) and each.numel() == 1]
        if not tensors or not losses:
            return False
        with contextlib.suppress(RuntimeError):  # an operation that cannot be differentiated twice
            gradients: Any = torch.autograd.grad(losses, tensors, create_graph=True, allow_unused=True)
            firsts = [
                (each[:size] * torch.linspace(1, 2, each.shape[-1], device=each.device, dtype=each.dtype)).sum()
                for each, (_, size) in zip(gradients, self.outputs, strict=True)
                if each is not None and each.requires_grad
            ]
            if firsts:
                seconds: Any = torch.autograd.grad(firsts, tensors, retain_graph=True, allow_unused=True)
                pairs = zip(seconds, self.outputs, strict=True)
                return any(each is not None and bool(each[size:].any()) for each, (_, size) in pairs)
        return False

    def forward(self, output: Any, inputs: Any, size: int) -> None:
        """Note a forward that records gradients, with the number of samples of its first part."""
        # Beside the mark of the block: only the first forwards of a run are marked, and of one process, too.
        mark_outputs(output, inputs=inputs, owners=[self])
        found = [each for each in leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
        self.outputs += [(each, size) for each in found if each.ndim and len(each) > size]

    def warn(self, what: str) -> None:
        """Warn of what makes the weights depend on the number of processes."""
        text = f"{self.what}: {what}, so that the weights depend on the number of processes"
        warnings.warn(text, stacklevel=user_stacklevel())


@contextlib.contextmanager
def same_bits(run: Runtime) -> Iterator[PartsOfBlock | None]:
    """Compute in the context with deterministic kernels, and with one number of threads for any number of processes.

    torch warns by name of the kernels that have no deterministic variant.

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


class Parts(nn.Module):
    """Runs the forward of a model part by part, and joins the outputs.

    Args:
        inner: calls the user's forward.
        parts: what the models of the block share.
        options: of the backend.

    Raises:
        ConfigError: the model's gradients, or the block's options, have other bits at another number of processes.
    """

    def __init__(self, inner: Inner, parts: PartsOfBlock, options: DDPOptions) -> None:
        super().__init__()
        self._bits, world = parts, current().world
        assert self._bits.run.config.logical is not None
        self._inner, self._count = inner, self._bits.run.config.logical // world.world_size
        self._first = world.rank * self._count
        self._drawn = self._since = 0  # number drawn by the latest recorded forward, and forwards since it
        self._recorded = 0
        self._split = SplitAtBuckets(25 * 2**20)
        self._bits.names.update((id(each), name) for name, each in all_named_parameters(inner.model))
        # Autocast keeps a copy in half precision of a leaf, to which all its gradients go, and none of an alias.
        self._has_aliases = self._count > 1 or type(inner.session) is not Session
        session: Any = inner.session
        is_in_half = any(getattr(session, name, None) is not None for name in ("scaling", "weights"))
        for is_fault, what, fix in (
            (any(map(has_sparse_gradient, inner.modules())), "an embedding of sparse gradients", "use sparse=False"),
            (inner.buffer_source == "mean", "buffers='mean'", "drop buffers="),
            (not options.broadcast_buffers, "broadcast_buffers=False", "drop it"),
            (options.reduction(inner).dtype, "gradients that are sent in another dtype", "drop comm_hook="),
            (is_in_half, "amp in fp16, or of level O2 or O3", "use amp='bf16'"),
        ):
            if is_fault:
                why = "the bits would depend on the number of processes"
                raise ConfigError(f"{self._bits.what} with {what}", why=why, fix=fix)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of this process's parts of a batch, and return their joined outputs."""
        refuse_transform(
            "logical= divides each batch into parts, and a transform hides how many samples there are",
            fix="drop logical=, or transform only what is computed outside of the model's forward",
        )
        bits, is_recorded = self._bits, torch.is_grad_enabled()
        sizes = self._sizes((args, kwargs), is_recorded=is_recorded)
        if is_recorded:
            passes, bits.passes = bits.passes, bits.run.loaders.passes
            is_same_pass = passes == bits.passes
            if bits.forwards and is_same_pass and bits.generators is not None and bits.generators.has_changed():
                bits.warn("random numbers were drawn between two forwards, perhaps for each sample")
            # A number that all processes draw alike.
            self._drawn, self._since = int(torch.randint(2**62, (), device="cpu").item()), 0
            self._recorded += 1
            bits.forwards = max(bits.forwards - 1, 0)
        self._since += 1
        parts = _split((args, kwargs), sizes)
        is_first = is_recorded and self._recorded == 1
        buffers = dict(self._inner.named_buffers()) if is_first or len(parts) > 1 else {}
        # Each part begins with the same buffers; those of the first one stay, as rank 0's under ddp.
        copies = [{name: each.clone() for name, each in buffers.items()} for _ in parts[1 - is_first :]]
        state = RNGState(bits.run.devices)
        try:
            outputs = [self._run(number, *each) for number, each in enumerate(zip(parts, [{}, *copies], strict=False))]
            if is_first and not _are_equal(outputs[0], self._run(0, parts[0], copies[-1])):
                bits.warn("forward has returned other bits when a part of a batch ran again")
        finally:
            state.restore()
            bits.generators = state if is_recorded else None
        output = outputs[0] if len(outputs) == 1 else _joined(outputs, sizes)
        if is_recorded and bits.looks:
            bits.forward(output, (args, kwargs), sizes[0])
        return output

    def _run(self, number: int, part: Any, buffers: dict[str, torch.Tensor]) -> Any:
        bits = self._bits
        seed = derive_seed(self._drawn, self._since, self._first + number)
        for each in global_generators(bits.run.devices).values():
            each.seed(seed)
        tensors = dict(buffers)
        if self._has_aliases and torch.is_grad_enabled():
            known = bits.aliases.setdefault(self, {})
            for name, parameter in self._inner.named_parameters() if not known else ():
                if parameter.requires_grad:
                    known[name] = _tree(parameter.view_as(parameter), self._count)
            tensors.update((name, aliases[number]) for name, aliases in known.items())
        args, kwargs = part
        with self._split:
            return functional_call(self._inner, tensors, args, kwargs) if tensors else self._inner(*args, **kwargs)

    def _sizes(self, inputs: Any, *, is_recorded: bool) -> list[int]:
        """Return the number of samples in each part."""
        tensors = [each for each in leaves(inputs) if isinstance(each, torch.Tensor) and each.ndim]
        size = len(tensors[0]) if tensors else 0
        batches = current().loaders.parts_by_size
        known, is_even = batches.get(size, ([], False))
        if known and (is_even or not is_recorded):
            return [each for each in known if each]
        if not is_recorded:
            return [size]
        kind = type(self._inner.model).__name__
        raise ConfigError(
            f"{self._bits.what} with a forward of {kind} whose inputs have {size or 'no'} samples",
            why="its parts have unequal numbers of samples"
            if known
            else f"the batches of shard_loader have {' or '.join(map(str, batches)) or 'none'} in this process",
            fix="use tail='pad' or 'drop'"
            if known
            else "call the model with a whole batch of shard_loader, of tensors with the batch dimension first",
        )


def _are_equal(first: Any, again: Any) -> bool:
    pairs = zip(leaves(first), leaves(again), strict=True)
    return all(torch.equal(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor))


def _tree(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return aliases of a tensor, whose gradients autograd adds in pairs."""
    if count == 1:
        return [tensor]
    halves = (tensor.view_as(tensor) for _ in range(2))
    return [each for half in halves for each in _tree(half, count // 2)]


def _split(inputs: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the inputs of each part; tensors without the batch dimension go to all of them."""
    if len(sizes) == 1:
        return [inputs]
    starts = itertools.accumulate(sizes, initial=0)

    def part(start: int, size: int) -> Any:
        def narrowed(leaf: Any) -> Any:
            has_batch = isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == sum(sizes)
            # A part begins where an allocation does, as the batch of a process with this part alone. Libraries choose
            # their kernels by the alignment of addresses too, such as cuBLAS up to 256 bytes.
            return leaf.narrow(0, start, size).clone() if has_batch else leaf

        return map_leaves(narrowed, inputs)

    return list(itertools.starmap(part, zip(starts, sizes, strict=False)))


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the output of a batch: rows of all parts, means of losses, and what is equal in all."""
    columns = zip(*map(leaves, outputs), strict=True)
    return with_leaves(outputs[0], [_joined_leaf(column, sizes) for column in columns])


def _joined_leaf(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        is_equal = all(each == first for each in parts)
    elif first.ndim and all(each.shape[:1] == (size,) for each, size in zip(parts, sizes, strict=True)):
        return torch.cat(list(parts))
    elif not first.ndim and first.is_floating_point():
        values = [each * (size * len(sizes) / sum(sizes)) for each, size in zip(parts, sizes, strict=True)]
        while len(values) > 1:
            values = [sum(values[index : index + 2]) for index in range(0, len(values), 2)]
        return values[0] / len(sizes)
    else:
        is_equal = all(each.shape == first.shape and torch.equal(each, first) for each in parts)
    if not is_equal:
        raise ConfigError(
            f"an output of forward under logical=: {getattr(first, 'shape', type(first).__name__)}",
            why="it differs between the parts of a batch, and has no batch dimension to join them",
            fix="return tensors with the batch dimension first, or losses that are means over samples",
        )
    return first
