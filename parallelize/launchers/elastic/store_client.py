"""Client of the store that the nodes of a run share: every request returns in time or marks the store as lost.

torch's TCPStore client waits forever for a host that has vanished. Therefore a thread makes the requests, and callers
wait for each reply with a timeout. The same thread sends this node's heartbeat every second, even while the agent is
busy starting or stopping processes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["StoreClient"]

T = TypeVar("T")

_HEARTBEAT_EVERY_S = 1.0


class StoreClient:
    """Requests to a store that may be on another host, each with a deadline.

    Args:
        store: the store.
        timeout_s: timeout of each request; after the first timeout all requests fail immediately.

    Attributes:
        heartbeat_key: key that is set to the current time every second; "": no heartbeat is sent.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self.store, self._timeout_s = store, timeout_s
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._is_lost = False
        self.heartbeat_key = ""
        self._last_heartbeat = 0.0
        # A daemon thread, because it may be blocked in a request when this process ends.
        threading.Thread(target=self._serve_requests, name="parallelize-store-client", daemon=True).start()

    def prefixed(self, prefix: str) -> dist.Store:
        """Return the store with a prefix before its keys; requests to it bypass this client's timeout."""
        return dist.PrefixStore(prefix, self.store)

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._request(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # set() accepts bytes too

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return self._request(lambda: self.store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._request(lambda: self.store.check(list(keys)))

    def _request(self, request: Callable[[], T]) -> T:
        """Make a request in the thread and wait for its result.

        Raises:
            DistNetworkError: this request or an earlier one timed out.
            DistError, RuntimeError: raised by the store.
        """
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._is_lost:
            self._requests.put((request, replies))
        try:
            reply, error = replies.get(block=not self._is_lost, timeout=self._timeout_s)
        except queue.Empty:
            self._is_lost = True
            raise dist.DistNetworkError(f"no answer within {self._timeout_s:g} s") from None
        if error is not None:
            raise error
        return reply  # type: ignore[no-any-return]  # the result of `request`

    def _serve_requests(self) -> None:
        while True:
            self._send_heartbeat_if_due()
            try:
                request, replies = self._requests.get(timeout=_HEARTBEAT_EVERY_S)
            except queue.Empty:
                continue
            try:
                replies.put((request(), None))
            except BaseException as exc:  # noqa: BLE001 - re-raised in the thread that made the request
                replies.put((None, exc))

    def _send_heartbeat_if_due(self) -> None:
        now = time.monotonic()
        if self.heartbeat_key and now - self._last_heartbeat >= _HEARTBEAT_EVERY_S:
            self._last_heartbeat = now
            with contextlib.suppress(dist.DistError, RuntimeError):  # the next request raises the error
                self.store.set(self.heartbeat_key, str(now))
