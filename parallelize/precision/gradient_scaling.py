"""Loss scaling that the user's loop does not see: true gradients between backward and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakIdKeyDictionary

from parallelize.precision import refusals
from parallelize.precision.found_inf import Rounds
from parallelize.precision.loss_scale import LossScale
from parallelize.precision.reachable_leaves import Reach, mark, reach
from parallelize.precision.skipped_step import Skips
from parallelize.precision.unscale import scale_, unscale_
from parallelize.precision.unscaled_hooks import TrueGradients
from parallelize.runtime.gradients import parameters_of

__all__ = ["Roots", "Scaling"]

Roots = Sequence[torch.Tensor | GradientEdge]
Gradients = Sequence[torch.Tensor | None]


class Scaling:
    """Scales losses, unscales gradients and leaves out steps whose gradients hold inf or nan.

        backward                                         step
        ├ gradients already there   x scale              ├ optimizer that knows `found_inf`: tell it (nothing waits)
        ├ torch's, started from the scale instead of 1   ├ inf or nan: a stand-in takes the step
        └ all gradients             / scale, any inf?    └ else: as it is

    What lies in `.grad` outside of backward is the true gradient, so that clipping, logging and accumulation need no
    word about a scale, and `autograd.grad` is not concerned at all. Multiplying back what is already there is exact
    (by a power of two), so that several backwards accumulate in the scaled domain, as under GradScaler.

    Args:
        scale: the loss scale.
        agree: makes a flag (0 or 1, without dimensions) the same on all ranks; None: it is so anyway.
    """

    def __init__(self, scale: LossScale, *, agree: Callable[[torch.Tensor], None] | None = None) -> None:
        self._scale = scale
        self._rounds = Rounds(scale, agree=agree)
        self._is_sharded = agree is not None
        self._skips = Skips()
        self._hooks = TrueGradients(scale)
        self._models: list[nn.Module] = []
        self._parameters: dict[int, nn.Parameter] = {}
        self._retained: Any = WeakIdKeyDictionary()
        self._trusts_marks: bool | None = None

    def adopt(self, models: Sequence[nn.Module]) -> None:
        """Count models as the block's own, with the parameters they have now.

        Raises:
            ConfigError: a parameter in fp16.
        """
        self._models += [model for model in models if not any(model is each for each in self._models)]
        self._look_again()

    def release(self, models: Sequence[nn.Module]) -> None:
        """Take back `adopt`."""
        self._models = [each for each in self._models if not any(each is model for model in models)]
        self._look_again()

    def _look_again(self) -> None:
        found: dict[int, nn.Parameter] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                if parameter.dtype is torch.float16:
                    raise refusals.half_parameter(name, parameter)
                found[id(parameter)] = parameter
        gone = [each for key, each in self._parameters.items() if key not in found]
        self._rounds.forget(gone)
        self._hooks.release(gone)
        self._hooks.adopt(found.values())
        self._parameters = found
        self._trusts_marks = None

    def hooked(self) -> contextlib.AbstractContextManager[None]:
        """Show true gradients to the hooks that are registered while this lasts."""
        return self._hooks.at_work()

    def retain(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is no leaf among those that backward gives gradients to."""
        self._retained[tensor] = None

    def mark(self, outputs: Any, *, args: Any, kwargs: Any) -> None:
        """Note what a routed forward has made of what."""
        mark(outputs, args=args, kwargs=kwargs, owner=self)

    def backward(self, roots: Roots, gradients: Gradients, run: Callable[[Gradients], None]) -> None:
        """A backward from the outside, scaled if it gets to the block's parameters.

        Args:
            roots: where it starts.
            gradients: from what, one for each root; None: from 1.
            run: torch's own backward, from the gradients it is given.

        Raises:
            ConfigError: a CUDA graph is being captured.
        """
        reached = self._reach(roots)
        if not reached.known:
            run(gradients)
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise refusals.cuda_graph()
        self._skips.give_up()
        self._rounds.close()
        leaves = [*self._parameters.values(), *reached.others, *self._retained.keys()]
        scale_(leaves, self._scale)
        try:
            with self._hooks.passing():
                run([self._start(root, gradient) for root, gradient in zip(roots, gradients, strict=True)])
        finally:
            groups = self._rounds.grouped(leaves)
            self._rounds.record(groups, unscale_(groups, self._scale))

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Judge a step that is about to be taken.

        Args:
            optimizer: the one that steps.
            args: of its `step`, itself the first.
            kwargs: of its `step`.

        Returns:
            Other arguments to step with; None: these.

        Raises:
            ConfigError: a step that loss scaling cannot judge.
        """
        parameters = list(parameters_of(optimizer))
        if not self._is_ours(optimizer, parameters):
            return None
        if torch._C._current_graph_task_id() != -1:
            raise refusals.optimizer_in_backward(optimizer)
        if any(each is not None for each in (*args[1:2], kwargs.get("closure"))):
            raise refusals.closure(optimizer)
        if self._skips.is_inside:
            return (self._skips.begin(optimizer), *args[1:]), kwargs
        found = self._rounds.verdict(optimizer, parameters)
        if found is None:
            return None
        if _judges_itself(optimizer):
            optimizer.__dict__.update(grad_scale=None, found_inf=found)
        elif found.item():
            return (self._skips.begin(optimizer), *args[1:]), kwargs
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer back what `before_step` took or gave."""
        self._skips.end(optimizer)
        if _judges_itself(optimizer):
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)

    def close(self) -> None:
        """End the round and whatever a step has left open."""
        self._skips.give_up()
        self._rounds.close()

    def state_dict(self) -> dict[str, Any]:
        """The scale's, once the round is closed."""
        self.close()
        return self._scale.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.close()
        self._scale.load_state_dict(state)

    def _reach(self, roots: Roots) -> Reach:
        """Where a backward gets to. The first one is looked at in full: does a leaf lie where marks let us not look?"""
        short = reach(roots, known=self._parameters, owner=self)
        # Sharded parameters are gathered for a forward: the leaves behind its mark are copies, and all are the model's.
        if self._is_sharded or self._trusts_marks or not short.known:
            return short
        whole = reach(roots, known=self._parameters, owner=None)
        if self._trusts_marks is None:
            self._trusts_marks = len(whole.others) == len(short.others)
        return whole

    def _start(self, root: torch.Tensor | GradientEdge, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What backward starts from: the scale for 1, and so many times any other gradient."""
        if gradient is None:
            gradient = _one_for(root)
        if gradient is None:
            return None
        return (gradient * self._scale.on(gradient.device)[0]).to(gradient.dtype)

    def _is_ours(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
        unknown = [each for each in parameters if id(each) not in self._parameters]
        if not unknown:
            return True
        if not any(self._rounds.has_judged(each) for each in unknown) and len(unknown) == _count(optimizer):
            # Nothing of the block's, and no loss of the block's has led there: an optimizer of its own.
            return False
        raise refusals.unknown_parameters(optimizer, list(_placed(optimizer, unknown)))


def _one_for(root: torch.Tensor | GradientEdge) -> torch.Tensor | None:
    """The gradient that torch starts from by itself; None where it refuses to, which it then says itself."""
    if isinstance(root, GradientEdge):
        meta = root.node._input_metadata[root.output_nr]
        size = torch.Size(meta.shape)
        return torch.ones(size, dtype=meta.dtype, device=meta.device) if size.numel() == 1 else None
    if not root.requires_grad or root.numel() != 1 or not root.is_floating_point():
        return None
    return torch.ones_like(root, memory_format=torch.preserve_format, requires_grad=False)


def _judges_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's kernels read `found_inf`, so that the host need not wait for it: torch's fused ones."""
    reads = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(reads) and all(group.get("fused") for group in optimizer.param_groups)


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _placed(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = {id(each) for each in parameters}
    for number, group in enumerate(optimizer.param_groups):
        for index, each in enumerate(group["params"]):
            if id(each) in wanted:
                yield f"param_groups[{number}]['params'][{index}]", each
