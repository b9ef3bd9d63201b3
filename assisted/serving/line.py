"""Whose turn it is: first come, first served, one call at a time. A batch that has the turn takes those who wait next into its
rows, as long as they may join it.

Knows threads; nothing of models or of HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from .fields import Refused

LEFT = "the client has left"


def require_client(left: threading.Event | None) -> None:
    """Raise ConnectionAbortedError once nobody waits for the answer."""
    if left is not None and left.is_set():
        raise ConnectionAbortedError(LEFT)


class Place:
    """A place in the line.

    Args:
        key: of the batches that it may join; None for none.
        asked: what it asks of a row, given the batch.

    Attributes:
        joined: a batch has it in a row. done: its text has ended, or failed with `error`.
    """

    def __init__(self, key: Hashable = None, asked: Callable[[Any], Any] | None = None):
        self.key, self.asked = key, asked
        self.joined, self.done = False, threading.Event()
        self.error: Exception | None = None

    def wait(self, left: threading.Event | None) -> None:
        """Wait for the end of its row. Raises what ended it, and as `require_client`."""
        while not self.done.wait(0.5):
            require_client(left)
        require_client(left)
        if self.error is not None:
            raise self.error


class Line:
    """The line.

    most: that may wait. seconds: for which one may.
    """

    def __init__(self, most: int, seconds: float):
        self.most, self.seconds = most, seconds
        self.waiting: deque[Place] = deque()  # the first one's turn it is
        self.rows: list[Place] = []  # those whom the batch has joined that has the turn
        self.changed = threading.Condition()

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        with self.changed:
            inside, rows = len(self.waiting), len(self.rows)
            return rows or min(inside, 1), max(0, inside - 1)

    @contextmanager
    def turn(self, left: threading.Event | None, me: Place | None = None) -> Iterator[None]:
        """Wait for a turn, and have it, or until a batch has taken this place. Raises Refused if too many wait or it takes too
        long, and as `require_client`."""
        me, until = me or Place(), time.monotonic() + self.seconds
        with self.changed:
            if len(self.waiting) > self.most:
                raise Refused(f"queue: {self.most} requests are waiting already; ask again later", 503)
            self.waiting.append(me)
        try:
            with self.changed:
                while not me.joined and self.waiting[0] is not me:
                    self.changed.wait(0.5)
                    if not me.joined:
                        require_client(left)
                        if time.monotonic() > until and self.waiting[0] is not me:
                            raise Refused(f"queue: no turn within {self.seconds:g} s; ask again later", 503)
            yield
        finally:
            with self.changed:
                if me in self.waiting:
                    self.waiting.remove(me)
                self.changed.notify_all()

    def has_next(self, key: Hashable) -> bool:
        """Whether the one who waits next may join a batch of this kind."""
        with self.changed:
            return len(self.waiting) > 1 and self.waiting[1].key == key

    def next(self, key: Hashable) -> Place | None:
        """The one who waits next, if it may join a batch of this kind."""
        with self.changed:
            if len(self.waiting) < 2 or self.waiting[1].key != key:
                return None
            place = self.waiting[1]
            del self.waiting[1]
            self._join(place)
            return place

    def begin_batch(self, first: Place) -> None:
        """The one whose turn it is becomes the first of a batch, which has the turn until `end_batch`."""
        with self.changed:
            self.waiting[0] = Place()
            self._join(first)

    def ended(self, place: Place, error: Exception | None = None) -> None:
        """The text of a row has ended."""
        with self.changed:
            self.rows.remove(place)
        place.error = error
        place.done.set()

    def end_batch(self, error: Exception | None) -> None:
        """The batch is over. error: for all whose texts have not ended."""
        for place in list(self.rows):
            self.ended(place, error)
        with self.changed:
            self.waiting.popleft()
            self.changed.notify_all()

    def _join(self, place: Place) -> None:
        place.joined = True
        self.rows.append(place)
        self.changed.notify_all()
