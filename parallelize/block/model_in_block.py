"""A model in a block: what happens between the user's call of the model and the engine.

    model(x)                the method that the Route has set on the model
    └── _call               moves the inputs to the device
        ├── _before_forward with gradients: the first forward chooses the engine and logs a line;
        │                   parameters that the user has added are hooked; a rank that iterates
        │                   other data than the first rank raises
        ├── the engine      runs the user's forward
        └── _after_forward  with gradients: marks the outputs in the autograd graph

Without gradients, this file waits for no other rank, so that one rank may evaluate alone. The
engine of fsdp does wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from parallelize.agreement.fingerprint import require_same_model
from parallelize.agreement.rank_consistency import run_checks
from parallelize.agreement.verification import Verification
from parallelize.backends.broadcast import broadcast_from_rank_0
from parallelize.block.models import methods_of
from parallelize.errors import SyncError
from parallelize.gradients.autograd_graph import mark_outputs, node_of
from parallelize.plugins.base import Engine, Inner
from parallelize.run.containers import replace_leaves
from parallelize.run.context import Runtime, current
from parallelize.run.default_group import default_store
from parallelize.torch_patches.compile import traceable
from parallelize.torch_patches.forward import Route, watching_registrations
from parallelize.torch_patches.module_tensors import all_parameters

if TYPE_CHECKING:
    from parallelize.block.block import Block

_NAMED_CHANGES = 3
"""The error about a model that has changed names at most this many changes."""


class ModelInBlock:
    """A model of a block, with its engine.

    `route_of(model).owner` is this object. Other folders know it as a `RoutedModel`.

    Args:
        block: the block.
        model: the user's model.

    Attributes:
        session: mixed precision of the block.
    """

    def __init__(self, block: Block, model: nn.Module) -> None:
        self._block = block
        self.session = block.session
        self.inner = _inner_of(model, block)
        self._engine = block.build_engine(self.inner)
        # Names of submodules and parameters that were added or replaced since the latest forward.
        self._changes: list[str] = []
        self._forwards = 0
        # Loaders add checks to the active run. A block with options of its own has another Runtime,
        # in which these checks would be missing.
        self._pending_checks = current().state.pending_checks
        self._number = _number_of_model(block.run)
        self._input_device: torch.device | None = None
        if not self._engine.moves_inputs and block.run.device.type != "cpu":
            self._input_device = block.run.device

    @property
    def engine(self) -> Engine:
        """The engine that runs the model."""
        return self._engine

    @property
    def replicas(self) -> nn.Module:
        """The module of which each rank holds a copy: the model, unless the engine has another."""
        return self._engine.replicas or self.inner.model

    @property
    def verification(self) -> Verification | None:
        """The comparisons of the ranks in the block; None: there is one rank."""
        return self._block.verification

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Route the calls of the model in the context, and close the engine at its end."""
        inner = self.inner
        route = Route(
            inner.model,
            inner.original_methods,
            call=self._call,
            bind=inner.bind_method,
            owner=self,
        )
        self._block.summary.add_model(inner.model, self._engine)
        has_failed = True
        try:
            route.install()
            with watching_registrations(self._on_registered):
                yield
            has_failed = False
        finally:
            route.uninstall()
            self._engine.close(failed=has_failed)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward leaves gradients local."""
        # Either the block's reducer averages the gradients of the model, or the engine does.
        reducer = self._block.reducer
        if reducer is not None and self._engine.reduction is not None:
            return reducer.no_sync(self.replicas)
        return self._engine.no_sync()

    def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        """Run a method of the model by the engine; the Route calls this for the user's calls."""
        # This sets the attribute `method` without nn.Module.__setattr__, which is slow.
        self.inner.__dict__["method"] = method
        if self._input_device is not None:
            args, kwargs = replace_leaves(self._on_input_device, (args, kwargs))
        if not torch.is_grad_enabled():
            # A rank may evaluate alone: nothing on this path may wait for other ranks.
            return self.session.route(self._engine.local, *args, **kwargs)
        self._before_forward((args, kwargs))
        output = self.session.route(self._engine.module, *args, **kwargs)
        self._after_forward(output, (args, kwargs))
        return output

    def _on_input_device(self, leaf: Any) -> Any:
        """Return a tensor of the inputs on the device; return any other value as it is."""
        device: Any = self._input_device
        if isinstance(leaf, (torch.Tensor, PackedSequence)):
            return leaf.to(device, non_blocking=True)
        return leaf

    def _before_forward(self, inputs: Any) -> None:
        """Prepare a forward with gradients.

        All ranks make these forwards together, so that the steps below may be collectives.
        """
        block = self._block
        if not block.first_step.is_over:
            block.first_step.add(inputs)
        if not self._engine.is_chosen:
            self._choose_engine(inputs)
        if not block.summary.is_over:
            block.summary.log_once()
        if self._changes:
            self._follow_changes()
        self._forwards += 1
        if self._pending_checks and self._engine.reduction is not None:
            run_checks(self._pending_checks, f"{self._number}/{self._forwards}")

    def _choose_engine(self, inputs: Any) -> None:
        """Let the engine of backend="auto" choose how to run the model, at the first forward."""
        if self._block.reducer is not None:
            # The reducer has hooks on the parameters. An engine that shards the parameters would
            # keep these hooks. `refresh` sets new ones, if the chosen engine needs the reducer.
            self._block.reducer.close()
        self._engine.choose(inputs)
        self._block.refresh()

    def _after_forward(self, output: Any, inputs: Any) -> None:
        """Mark the outputs in the autograd graph, and watch backward passes through them.

        A mark tells whether a loss comes from the models of this block. The averaging and the
        session of fp16 search the graphs of losses for marks. Each of them is an owner of marks.
        """
        averaging, batch_losses = self._block.averaging, self._block.batch_losses
        owner_of_session = self.session.mark_owner
        owners: list[object] = []
        if averaging.needs_marks:
            owners.append(averaging)
        if owner_of_session is not None:
            owners.append(owner_of_session)
        # The nodes of the outputs are needed for marks, and for the checks of several ranks.
        if not owners and self._block.run.world.world_size == 1:
            return
        # Function modes, such as the user's, would see the operations of `mark_outputs`, which are
        # not part of the user's program.
        with torch._C.DisableTorchFunction():
            nodes = mark_outputs(output, inputs=inputs, owners=owners)
        if owner_of_session is not None:
            self.session.watch_outputs(nodes)
        if not batch_losses.is_over:
            batch_losses.mark(nodes, inputs)
        if self._engine.reduction is not None:
            for node in nodes:
                node.register_prehook(self._refuse_after_block)

    def _refuse_after_block(self, _gradients: Any) -> None:
        """Refuse a backward pass after the block through an output that was computed in the block.

        It is a hook on the nodes of the outputs, and is called when a pass reaches them. A pass
        that accumulates no gradient in a parameter, as for the gradient of an input, may go on.

        Raises:
            SyncError: the pass would train the model with gradients that nobody averages.
        """
        if not self._block.is_over:
            return
        model = self.inner.model
        for parameter in all_parameters(model):
            if parameter.requires_grad and torch._C._will_engine_execute_node(node_of(parameter)):
                raise SyncError(
                    "backward after the parallel_model block, of a forward of "
                    f"{type(model).__name__} inside it",
                    why="gradients are averaged over the ranks in the block only",
                    fix="put the whole loop inside the block: "
                    "with parallel_model(model): for x, y in loader: ...",
                )

    def _on_registered(self, module: nn.Module, name: str, value: Any) -> None:
        """Note a submodule or parameter that the user is about to set in the model.

        torch calls this for every module of the process, before it sets the value.
        """
        if not self._has_part(module) or getattr(module, name, None) is value:
            return
        is_new = isinstance(value, nn.Module) or name not in module._parameters
        # An engine that does not keep the user's parameters, such as fsdp's, replaces parameters
        # itself. These replacements are no changes by the user.
        if is_new or self._engine.keeps_parameters:
            self._changes.append(name)

    def _has_part(self, module: nn.Module) -> bool:
        """Whether a module is the model, or a part of the model."""
        # Not by `in`: a class may override `__eq__`.
        return any(part is module for part in self.inner.model.modules())

    def _follow_changes(self) -> None:
        """Broadcast and hook the parameters that the user has added or replaced; a collective.

        Without this, each rank would train its own values of such a parameter.

        Raises:
            SyncError: the engine has sharded the parameters, or placed them on devices, at the
                entry of the block. It cannot do so for new parameters.
        """
        model = self.inner.model
        if not self._engine.keeps_parameters:
            names = ", ".join(self._changes[:_NAMED_CHANGES])
            backend = self._block.run.config.backend.name
            raise SyncError(
                f"{type(model).__name__} has changed: {names} was added or replaced",
                why=f"{backend} has sharded or placed its parameters at the entry of the block",
                fix="change the model before the block, or leave the block and enter it again",
            )
        self._changes.clear()
        model.to(self._block.run.device)
        if self._block.reducer is not None and self._engine.reduction is not None:
            require_same_model(model)
            # The reducer has a slot for each parameter that was in the model before.
            slots = self._block.reducer.slots
            new_parameters = [
                parameter for parameter in all_parameters(model) if id(parameter) not in slots
            ]
            broadcast_from_rank_0(new_parameters)
        self._engine.refresh()
        self._block.refresh()


def _inner_of(model: nn.Module, block: Block) -> Inner:
    """Return the module around a model that an engine runs.

    It calls the methods of the model as they are now, before the Route replaces them.
    """
    original_methods = {}
    for name, method in methods_of(model, block.options.methods).items():
        original_methods[name] = traceable(method)
    return Inner(
        model,
        original_methods=original_methods,
        session=block.session,
        buffer_source=block.options.buffers or "rank0",
    )


def _number_of_model(run: Runtime) -> int:
    """Return how many models this rank has had in blocks, with the new one.

    All ranks enter blocks in one order, so that a model has the same number on each rank. The names
    of sync points (see agreement/rank_consistency.py) contain this number. They are keys in the
    store of the process group, so that the count is there, too: a later run in the same group must
    not use a name again.
    """
    if run.world.world_size == 1:
        return 0
    return int(default_store().add(f"parallelize/models of rank {run.world.rank}", 1))
