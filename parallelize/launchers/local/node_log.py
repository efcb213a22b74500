"""What the nodes of a call write into a TCPStore: messages in one order, and heartbeats.

    nodes/rank/<node>     a token of the process that is this node: the first that sets the key
    nodes/beat/<node>     a number that grows while the node lives
    nodes/said/<number>   a message, which is JSON. All nodes read them in the order of numbers

If its connection ends, a request to the store raises a RuntimeError of torch. To a server that is
stopped or cut off it does not return: TCPStore.cpp has a timeout only for keys that do not exist.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist


class Message(NamedTuple):
    """What a node says.

    Args:
        event: see `nodes.py`.
        node: rank of the node that it is about: the one that says it, but for a lost one.
        value: a value that JSON has.
    """

    event: str
    node: int
    value: Any


class NodeLog:
    """The messages and heartbeats, as one node reads and writes them."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        # The number of the first message that this node has not read.
        self._unread = 0
        # Node -> the number of its heartbeat, and when that has grown.
        self._beats: dict[int, tuple[int, float]] = {}

    def beat(self, node: int) -> None:
        """Show that this node lives."""
        self._store.add(f"nodes/beat/{node}", 1)

    def silent_nodes(self, nodes: Iterable[int], patience_s: float) -> list[int]:
        """Return those of the nodes whose number has not grown for so long."""
        now_s = time.monotonic()
        silent = []
        for node in nodes:
            beat = self._store.add(f"nodes/beat/{node}", 0)
            latest, grown_at_s = self._beats.get(node, (-1, now_s))
            if beat != latest:
                self._beats[node] = (beat, now_s)
            elif now_s - grown_at_s > patience_s:
                silent.append(node)
        return silent

    def say(self, message: Message) -> None:
        """Add a message. This node will read it, too."""
        text = json.dumps(message)
        number = self._unread
        # The store returns what it has under the key: this text, or a message that came first.
        while self._store.compare_set(_key(number), "", text) != text.encode():
            number += 1

    def read(self) -> list[Message]:
        """Return the messages that this node has not read.

        Raises:
            ValueError: the text of a message is not one.
            TypeError: the same.
        """
        messages = []
        while self._store.check([_key(self._unread)]):
            event, node, value = json.loads(self._store.get(_key(self._unread)))
            messages.append(Message(str(event), int(node), value))
            self._unread += 1
        return messages


def _key(number: int) -> str:
    return f"nodes/said/{number}"
