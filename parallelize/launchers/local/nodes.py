"""The nodes of a call, on each of which the same script runs: how they meet, and what they say.

Node 0 serves a TCPStore at MASTER_ADDR:MASTER_PORT for each attempt of a call. The ranks meet in
it, too. What the nodes say is JSON, in the order and under the keys of `node_log.py`:

    joined      the node takes part. Value: its request (see `node_requests.py`)
    interrupt   Ctrl-C was pressed: all nodes interrupt their workers
    stop        a worker has failed: all nodes end theirs
    ended       how the ranks of the node have ended. Value: see `node_reports.py`
    lost        by node 0: a node is silent, or some have not joined in time. The call fails on all
                nodes. Value: what is wrong, why, and the fix
    left        the node says and reads no more. If it has not said `ended`, it is lost

    joined, by all nodes ──> workers run ──> ended, by all nodes ──> left
      └── lost                 └── stop, interrupt, lost: all nodes end their workers

A thread talks to the store several times a second, and the launcher asks what it has heard: a
request to a store that is stopped or cut off does not return, and signals must be handled
meanwhile. What a stranger writes into the store is read as data: it can end the call, but runs no
code.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from parallelize.call.outcome import Outcome
from parallelize.cluster.world import Node
from parallelize.errors import LaunchError, ParallelizeError
from parallelize.launchers.local.node_join import join, serve, unreachable_error
from parallelize.launchers.local.node_log import Message, NodeLog
from parallelize.launchers.local.node_reports import json_of_ends, outcomes_of_json
from parallelize.launchers.local.node_requests import Request, require_equal, texts_on_absent
from parallelize.launchers.local.one_node import Meeting

_TALK_EVERY_S = 0.1
_LOOK_EVERY_S = 0.05
_CLOSE_TIMEOUT_S = 5.0
_PATIENCE_AFTER_FAILURE_S = 10.0
_EVENTS = ("joined", "interrupt", "stop", "ended", "lost", "left")
_NO_MESSAGE = (ValueError, TypeError, LookupError)
"""What is raised for the text of a stranger."""


class Nodes:
    """All nodes of a call, as one of them sees them.

    Args:
        node: the address of node 0, and this node's rank, if it has been given one.
        num_nodes: number of nodes.
        request: what must be the same on all nodes.
        timeout: longest time until all nodes have joined.
        patience_s: seconds after which a silent node is lost.

    Attributes:
        node_rank: rank of this node; -1: it has not joined yet.

    Raises:
        LaunchError: node 0 cannot listen at its address.
    """

    def __init__(
        self,
        node: Node,
        num_nodes: int,
        request: Request,
        *,
        timeout: timedelta,
        patience_s: float,
    ) -> None:
        self.node_rank = -1
        self._node = node
        self._num_nodes = num_nodes
        self._timeout = timeout
        self._patience_s = patience_s
        # Event -> node -> value.
        self._heard: dict[str, dict[int, Any]] = {event: {} for event in _EVENTS}
        self._to_say: list[tuple[str, Any]] = [("joined", request)]
        self._error: ParallelizeError | None = None
        # None: this node does not leave yet.
        self._close_by_s: float | None = None
        # Since the store has answered, as the launcher and as the thread count.
        self._silence_s = 0.0
        self._looked_at_s = self._answered_at_s = time.monotonic()
        self._served_store = serve(node)
        # If node 0 is cut off, a request of the thread never returns: nobody must wait for it.
        self._thread = threading.Thread(target=self._live, name="parallelize-nodes", daemon=True)
        self._thread.start()

    # What the launcher calls, in this order

    def start(self) -> Meeting:
        """Wait until all nodes have joined.

        Raises:
            LaunchError: node 0 is not reached, not all nodes join in time, or a node is lost.
            ConfigError: the nodes make different calls, or two of them have the same rank.
        """
        node = self._node
        joined: dict[int, Request] = self._heard["joined"]
        end_s = time.monotonic() + self._timeout.total_seconds()
        while len(joined) < self._num_nodes:
            late_s = time.monotonic() - end_s
            # Each node compares all requests, and so all find the same difference.
            present = dict(joined)
            require_equal(present)
            if self._error is not None:
                raise self._error
            self._notice_silence()
            # Not a failure of workers: it may be heard just now, after the last node has joined.
            if self._heard["lost"]:
                raise self.lost_error()
            if late_s > _CLOSE_TIMEOUT_S and self.node_rank < 0:
                raise unreachable_error(node, self._timeout, "it does not answer")
            # One node decides for all who is absent.
            if late_s > 0 and self.node_rank == 0 and not self._to_say:
                self.say("lost", texts_on_absent(present, self._num_nodes, self._timeout))
            time.sleep(_LOOK_EVERY_S)
        require_equal(joined)
        return Meeting(self.node_rank, node.master_addr, node.master_port, joined[0].stamp)

    def has_failed(self) -> bool:
        """Return whether the call has failed on any node; called several times a second."""
        self._notice_silence()
        return bool(self._heard["lost"] or self._heard["stop"])

    def _notice_silence(self) -> None:
        """Note that node 0 is lost, if its store has not answered for too long.

        The thread cannot: its request does not return.
        """
        now_s = time.monotonic()
        # If this process was stopped, the interval is long, and says nothing about node 0.
        self._silence_s += min(now_s - self._looked_at_s, 1.0)
        self._looked_at_s = now_s
        if self.node_rank > 0 and self._silence_s > self._patience():
            self._hear(self._silent(0))

    def is_interrupted(self) -> bool:
        """Return whether Ctrl-C was pressed on any node."""
        return bool(self._heard["interrupt"])

    def say(self, event: str, value: Any = None) -> None:
        """Say something to all nodes, this one included; the thread does so."""
        self._to_say.append((event, value))

    def exchange(self, outcomes: Iterable[Outcome]) -> dict[int, Sequence[Outcome]]:
        """Say how the ranks of this node have ended; return how those of each other node have.

        The outcomes have no values. A node that is lost, or has left, has none.
        """
        self.say("ended", json_of_ends(outcomes))
        # As long as it waits, this node hears of Ctrl-C by its own signal handler only: its workers
        # have ended.
        while len(self._nodes_that_said("ended", "lost", "left")) < self._num_nodes:
            self._notice_silence()
            # Without node 0 nobody is heard, and who was given up is heard by nobody.
            if self._heard["lost"].keys() & {0, self.node_rank}:
                break
            time.sleep(_LOOK_EVERY_S)
        reports = dict(self._heard["ended"])
        reports.pop(self.node_rank, None)
        return reports

    def lost_error(self) -> LaunchError:
        """Return the error for the node that is lost, or for absent ones."""
        error: LaunchError = next(iter(self._heard["lost"].values()))
        return error

    def close(self) -> None:
        """Leave the other nodes. Node 0 waits until they have left, too, or some seconds."""
        # In this order: the thread ends when it has nothing to say.
        self.say("left")
        self._close_by_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._thread.join(_CLOSE_TIMEOUT_S)
        # A process that is forked later lacks the store's thread, and would crash when it frees it.
        self._served_store = None

    # What the thread does

    def _live(self) -> None:
        """Join, then talk until this node leaves, or node 0 is gone."""
        try:
            rank, store = join(
                self._node,
                self._served_store,
                self._num_nodes,
                self._timeout,
                is_leaving=lambda: self._close_by_s is not None,
            )
        except ParallelizeError as error:
            self._error = error
            return
        log = NodeLog(store)
        # The time until node 0 was there is no silence.
        self._silence_s = 0.0
        self._answered_at_s = time.monotonic()
        self.node_rank = rank
        try:
            while not self._has_left():
                self._talk(log)
                time.sleep(_TALK_EVERY_S)
        except (RuntimeError, *_NO_MESSAGE) as error:
            self._hear(self._stopped() or _gone(0, str(error).partition("\n")[0]))

    def _talk(self, log: NodeLog) -> None:
        """Show that this node lives, say what is to be said, and hear what was said."""
        log.beat(self.node_rank)
        while self._to_say:
            # It is removed when it is said: until then, `_has_left` must not be true.
            event, value = self._to_say[0]
            log.say(Message(event, self.node_rank, value))
            del self._to_say[0]
        # One node decides for all who is lost, so that all raise the same error.
        if self.node_rank == 0:
            stopped = self._stopped()
            if stopped is not None:
                log.say(stopped)
            gone = self._nodes_that_said("left", "lost")
            watched = self._heard["joined"].keys() - gone - {0}
            for node in log.silent_nodes(watched, self._patience()):
                log.say(self._silent(node))
        for message in log.read():
            self._hear(message)
        self._silence_s = 0.0
        self._answered_at_s = time.monotonic()

    def _has_left(self) -> bool:
        """Whether this node has said all, and no other node needs the store, or that takes long.

        As long as the thread has the store, its port is in use.
        """
        if self._close_by_s is None:
            return False
        if time.monotonic() > self._close_by_s:
            return True
        if self._to_say:
            return False
        users = self._heard["joined"].keys() - {0}
        return self.node_rank > 0 or users <= self._nodes_that_said("left", "lost")

    # What is heard, and how long is waited

    def _hear(self, message: Message) -> None:
        event, node, value = message
        # The values are checked here, in the thread: the launcher gets none of a stranger.
        if node not in range(self._num_nodes):
            raise ValueError(f"there is no node {node}")
        if event == "joined":
            value = Request.of_json(value)
        elif event == "ended":
            value = outcomes_of_json(value)
        elif event == "lost":
            fault, reason, fix = map(str, value)
            value = LaunchError(fault, why=reason, fix=fix)
        elif event == "left" and node not in self._heard["ended"]:
            self._hear(_gone(node, "its call has ended before those of other nodes"))
        # Nodes that leave because another one is lost are not lost.
        if event != "lost" or not self._heard["lost"]:
            self._heard[event].setdefault(node, value)

    def _nodes_that_said(self, *events: str) -> set[int]:
        """Return the nodes that have said at least one of these."""
        nodes = set[int]()
        for event in events:
            nodes.update(self._heard[event])
        return nodes

    def _patience(self) -> float:
        """Return for how many seconds a node may be silent."""
        if self._heard["stop"] or self._heard["lost"]:
            return min(self._patience_s, _PATIENCE_AFTER_FAILURE_S)
        return self._patience_s

    def _silent(self, node: int) -> Message:
        return _gone(node, f"no heartbeat for {self._patience():g} s")

    def _stopped(self) -> Message | None:
        """Return that this node is lost, if it was stopped for longer than the others wait.

        The store of node 0 answers it at once. If the answer has taken long, the process was
        stopped. On another node, the launcher has noticed by now that node 0 was silent.
        """
        silent_s = time.monotonic() - self._answered_at_s
        if silent_s <= self._patience_s:
            return None
        return _gone(self.node_rank, f"it was stopped for {silent_s:.0f} s")


def _gone(node: int, reason: str) -> Message:
    fix = (
        "see that node's output: its process was killed or stopped, its machine failed, or the "
        "network between them did; LocalLauncher(heartbeat_timeout=) allows longer pauses"
    )
    return Message("lost", node, [f"node {node} is gone", reason, fix])
