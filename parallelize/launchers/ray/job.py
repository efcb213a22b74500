"""A call on a Ray cluster: its placement group and actors, state, output and return value."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from parallelize.call.log_settings import LogSettings
from parallelize.call.task import Outcome, Task
from parallelize.call.torch_settings import TorchSettings
from parallelize.errors import LaunchError, WorkerError
from parallelize.launchers.batch_launcher import read_result
from parallelize.launchers.ray.node import KEPT_CHARACTERS, NodeActor, Output, import_ray

__all__ = ["Needs", "RayJob", "connect"]

R = TypeVar("R")

_POLL_EVERY_S = 0.1
_STOP_TIMEOUT_S = 10.0  # for the actors of the other nodes, after the first one has returned

_log = logging.getLogger("parallelize")


@dataclass(frozen=True)
class Needs:
    """What a call needs of the cluster.

    Args:
        bundle: resources of each node, as for Ray.
        strategy: placement strategy of the nodes.
        runtime_env: Ray's runtime environment of the nodes.
        threads: OMP_NUM_THREADS of the workers.
    """

    bundle: Mapping[str, float]
    strategy: str
    runtime_env: Mapping[str, Any]
    threads: str


def connect(address: str | None) -> None:
    """Connect this process to a cluster, unless it is connected; raise LaunchError if there is none."""
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        ray.init(address=address, logging_level="warning")
    except (ConnectionError, ValueError) as exc:
        raise LaunchError(
            f"no Ray cluster at address={address!r}",
            why=str(exc).partition("\n")[0],
            fix="start one, `ray start --head`, or use RayLauncher(address='ray://<head node>:10001')",
        ) from exc


class RayJob(Generic[R]):
    """A call that waits for the resources of a Ray cluster, or runs there; it ends with this process.

    Args:
        task: the call.
        needs: what the call needs of the cluster.
        shows: whether to show the job's state on stderr, and its output, while this process waits.
    """

    def __init__(self, task: Task, needs: Needs, *, shows: bool = False) -> None:
        self.id = f"{task.name}-{secrets.token_hex(3)}"
        self._task, self._needs, self._shows, self._ray = task, needs, shows, import_ray()
        with tempfile.TemporaryDirectory(prefix="parallelize-") as folder:
            path = Path(folder, "task")
            task.write(path)
            call = self._ray.put(path.read_bytes())
        self._arguments = (call, TorchSettings.capture(), LogSettings.capture())
        here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=True
        )
        self._output = self._ray.remote(Output).options(num_cpus=0, scheduling_strategy=here).remote()
        self._read, self._text = 0, ""
        self._outcomes: list[Outcome] = []
        self._error: BaseException | None = None
        self._end_state, self._shown_state, self._restarts = "", "", 0
        self._start()

    def _start(self) -> None:
        """Create the placement group and its actors, which Ray starts when it has the resources."""
        ray, needs, num_nodes = self._ray, self._needs, self._task.layout.num_nodes
        self._group = ray.util.placement_group([needs.bundle] * num_nodes, strategy=needs.strategy)
        own = {name: amount for name, amount in needs.bundle.items() if name not in {"CPU", "GPU"}}
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kinds = [
            ray.remote(
                num_cpus=needs.bundle["CPU"],
                num_gpus=needs.bundle.get("GPU", 0),
                resources=own,
                runtime_env=dict(needs.runtime_env),
                scheduling_strategy=place(self._group, index),
            )(NodeActor)
            for index in range(num_nodes)
        ]
        self._actors = [kind.remote(index, self._output, needs.threads) for index, kind in enumerate(kinds)]
        self._address = self._actors[0].rendezvous.remote()
        address = self._address if num_nodes > 1 else None
        self._running = {each.run.remote(*self._arguments, address): n for n, each in enumerate(self._actors)}

    @property
    def state(self) -> str:
        """PENDING, while the cluster lacks the resources; RUNNING, COMPLETED, FAILED or CANCELLED."""
        if self.done():
            return self._end_state
        return "RUNNING" if self._ray.wait([self._address], timeout=0)[0] else "PENDING"

    def done(self) -> bool:
        """Return whether the job has ended."""
        self._check(0)
        return bool(self._end_state)

    def logs(self) -> str:
        """Return the last 4 MB of the job's output so far."""
        self._read_output()
        return self._text

    def cancel(self) -> None:
        """Stop the job, waiting or running; do nothing if it has ended."""
        if not self._end_state:
            self._error = WorkerError(
                f"job {self.id} was cancelled and left no result", why="by cancel() or Ctrl-C", fix="submit it again"
            )
            self._end("CANCELLED")

    def result(self, timeout_s: float | None = None) -> R:
        """Wait for the call to end and return its value.

        Args:
            timeout_s: seconds to wait; None: no limit.

        Raises:
            TimeoutError: the job has no result in time.
            BaseException: the exception that the call raised, with rank and traceback as notes.
            LaunchError: a node is lost.
            WorkerError: the job was cancelled.
        """
        outcomes = self.outcomes(timeout_s)
        value: Any = [each.value for each in outcomes] if self._task.all_ranks else outcomes[0].value
        return value  # type: ignore[no-any-return]  # the value was pickled

    def outcomes(self, timeout_s: float | None = None) -> list[Outcome]:
        """Wait for the outcomes of all ranks, or of rank 0, and return them. Raises the same errors as `result`."""
        end = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while not self.done():
            if time.monotonic() > end:
                raise TimeoutError(f"job {self.id} has no result after {timeout_s:g} s; it is {self.state}")
            if self._shows:
                self._show_state()
                self._read_output()
            self._check(_POLL_EVERY_S)
        if self._error is not None:
            raise self._error
        return self._outcomes

    def _check(self, wait_s: float) -> None:
        """Wait for an actor to return or to be lost; keep its outcomes, or start the call again."""
        ready = self._ray.wait(list(self._running), timeout=wait_s)[0] if self._running else []
        for each in ready:
            index = self._running.pop(each)
            try:
                found = self._ray.get(each)
            except self._ray.exceptions.RayError as error:
                self._lose(index, error)
            else:
                self._keep(found)

    def _keep(self, result: bytes) -> None:
        """Keep the outcomes, or the failure: every node returns the same ones."""
        try:
            self._outcomes = read_result(result)
        except BaseException as error:  # noqa: BLE001 - raised again by `outcomes`
            self._error = error
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_STOP_TIMEOUT_S)
        self._end("FAILED" if self._error else "COMPLETED")

    def _lose(self, index: int, error: Exception) -> None:
        most = self._task.layout.config.max_restarts
        lost = LaunchError(
            f"node {index} of job {self.id} is gone",
            why=" ".join(str(error).split())[:500],
            fix="see Ray's dashboard and logs; max_restarts= starts the call again on another node",
        )
        if self._restarts == most:
            self._error = lost
            self._end("FAILED")
            return
        self._end("")
        self._restarts += 1
        _log.warning("restart %d of %d after %s: %s", self._restarts, most, type(lost).__name__, lost)
        self._start()

    def _end(self, state: str) -> None:
        """Kill the actors, whose workers end with them, and return the resources of the cluster."""
        self._read_output()
        self._running, self._end_state = {}, state
        for actor in [*self._actors, *([self._output] if state else [])]:
            self._ray.kill(actor)
        self._ray.util.remove_placement_group(self._group)

    def _show_state(self) -> None:
        state = self.state
        if state != self._shown_state:
            amount = f", for {self._task.layout.num_nodes} x {self._needs.bundle}"
            sys.stderr.write(f"ray job {self.id}: {state}{amount if state == 'PENDING' else ''}\n")
            self._shown_state = state

    def _read_output(self) -> None:
        if self._end_state:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):  # the node with the output is lost
            self._read, chunks = self._ray.get(self._output.read.remote(self._read))
            for stream, text in chunks:
                self._text = (self._text + text)[-KEPT_CHARACTERS:]
                if self._shows:
                    to = getattr(sys, stream)
                    to.write(text.encode(to.encoding or "utf-8", "replace").decode(to.encoding or "utf-8"))
                    to.flush()
