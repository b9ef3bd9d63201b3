"""Sessions of earlier calls, found by the tokens with which a prompt begins: agents, few-shot prompts, questions on a document.

Compares tokens, and forgets what another state of the model has read. Knows nothing of how a call runs, and shares nothing that
the caller does not share: calls have a pool in common only if they are given the same object.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .cache import SlotCache
from .segments import Segment
from .session import LEAST, Session, can_go_on


def in_common(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens two texts, [any] int64, have in common at their beginning."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    return int(differ.int().argmax()) if bool(differ.any()) else most


class State(Protocol):
    """A model with its weights as they were when it read something (`fast.sources.Source`)."""

    def same(self, other: Any, /) -> bool:
        """Whether what one has read is what the other would read."""
        ...


@dataclass(eq=False)
class _Entry:
    """A stored session.

    model: the target. text: [L] int64, what it has read, and the token after that, on the host. readers: calls that copy from
    it; until their ends, it must not change.
    """

    model: weakref.ref[Any]
    session: Session
    text: torch.Tensor
    readers: int = 0

    def shared(self, ids: torch.Tensor) -> int:
        """As `in_common` with this one. ids: [P] int64 on the host."""
        return in_common(self.text, ids)

    def usable(self, shared: int, width: int) -> int:
        """How many tokens need not be read again of a prompt with `width` tokens."""
        if self.session.in_slots:
            return min(shared, width) - 1
        held = len(self.text) - 1  # states are those after this token, and can't go back
        return held if held <= min(shared, width - 1) else 0

    def in_common(self, other: _Entry) -> int:
        """How many columns it has in common with another one that can be held once for both."""
        if self.model() is not other.model() or not (self.session.in_slots and other.session.in_slots):
            return 0
        return min(self.shared(other.text), len(self.text) - 1, len(other.text) - 1)


class SessionPool:
    """What earlier calls have read, for prompts that begin with the same tokens.

    Give one to `from_pretrained(..., sessions=SessionPool())`, set `model.sessions`, or pass `generate(..., sessions=)`. A call
    with one prompt then looks up the stored text that has the longest beginning in common with its prompt, and reads only the
    rest, in the target, in a draft model and in heads. A text that only goes on is taken over. If the texts part, both stay,
    and the target's keys and values of what they have in common are held once. The tokens are those of a call without a pool.

    Recurrent states can't go back to an earlier token. They are kept at the end of each text, and where a later prompt parts
    from a text (2411.19379), so that the third prompt with the same beginning profits.

    When weights, adapters, modules or code of a model have changed, what it has read before is forgotten. To find that out,
    each call reads all weights once, which takes about as long as a forward pass over one token. `assisted serve` and
    `assisted chat` have their models for themselves, and read the weights once in all.

    Time until the first token reveals whether another call had the same beginning. So users who must not learn about each
    other need pools of their own. Nothing is written to a disk.

    Args:
        max_bytes: limit of the stored keys, values and states, those of drafts included. The texts that were used last stay.

    Raises ValueError if the limit is below 1.
    """

    def __init__(self, max_bytes: int = 2**30):
        if max_bytes < 1:
            raise ValueError(f"max_bytes: {max_bytes} holds no text; give the bytes that may be kept, such as 2**30")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []  # the one that was used last comes last
        self._states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        """Number of stored texts."""
        return len(self._entries)

    def __repr__(self) -> str:
        return f"SessionPool(max_bytes={self.max_bytes}), {len(self)} texts in {self.nbytes} bytes"

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        with self._lock:
            return _nbytes_of(self._entries)

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._entries = []

    @contextmanager
    def lent(self, model: Any, state: State, ids: torch.Tensor, config: Any, takes_over: bool = True) -> Iterator[Lent]:
        """A context for one call, with a session that has read the beginning of its prompt as far as any text has it.

        model: the target. state: what it computes with at present. ids: the prompt, [P] int64. config: of the target's text
        decoder. takes_over: a text that goes on is not copied; until the end of the call, others do not find it.
        """
        text = ids.cpu()
        with self._lock:
            state = self._now(model, state)
            lent, source = self._found(model, text, config, takes_over)
            if source is not None:
                source.readers += 1
        try:
            yield lent
        finally:
            with self._lock:
                if source is not None:
                    source.readers -= 1
                for session in reversed(lent.left):  # the part that texts have in common is used last
                    self._store(model, state, session)
                if source in self._entries:  # it could not be divided while calls read it
                    _share(source, self._entries)

    def _now(self, model: Any, state: State) -> State:
        """The present state of a model. Drops what models have read that are gone or have changed since."""
        known = self._states.get(model)
        if known is None or not known.same(state):
            self._entries = [entry for entry in self._entries if entry.model() is not model]
            known = self._states[model] = state
        self._entries = [entry for entry in self._entries if entry.model() is not None]
        return known

    def _found(self, model: Any, text: torch.Tensor, config: Any, takes_over: bool) -> tuple[Lent, _Entry | None]:
        """A session for a prompt, and the stored text that it copies from."""
        known = [(entry, entry.shared(text)) for entry in self._entries if entry.model() is model]
        best = max(known, key=lambda found: found[0].usable(found[1], len(text)), default=None)
        most = max((shared for _, shared in known), default=0)
        usable = 0 if best is None else best[0].usable(best[1], len(text))
        parts = min(most, len(text) - 1)  # where a state is worth keeping
        ends = [parts] if parts - max(usable, 0) >= LEAST else []
        if best is None or usable < LEAST:
            return Lent(Session(config, model), ends, model, config), None
        entry, shared = best
        self._entries.remove(entry)
        takes_over = takes_over and len(entry.text) - 1 - usable < LEAST
        if takes_over and entry.session.in_slots and not (entry.session.segments or entry.readers):
            session = entry.session
        else:
            self._entries.append(entry)
            session = entry.session.branch()
        session.begin(shared, len(text))
        session.ids = None
        return Lent(session, ends, model, config), entry if session is not entry.session else None

    def _store(self, model: Any, state: State, session: Session) -> None:
        if session.ids is None or self._states.get(model) is not state:
            return
        entry = _Entry(weakref.ref(model), session, session.ids[0].cpu())
        entries = [*(one for one in self._entries if not _replaces(entry, one)), entry]
        _share(entry, entries)
        if _nbytes_of([entry]) > self.max_bytes:
            return
        self._entries = entries
        while _nbytes_of(self._entries) > self.max_bytes:
            self._entries.pop(0)


class Lent:
    """A session for one call.

    Args:
        session: as it goes on, or empty.
        ends: of the part that the prompt has in common with some text, if states should be kept there.
        model, config: the target and the config of its text decoder.

    Attributes:
        left: sessions that the call leaves for later ones.
    """

    def __init__(self, session: Session, ends: list[int], model: Any, config: Any):
        self.session, self.ends, self.model, self.config = session, ends, model, config
        self.left: list[Session] = []

    def mark(self, slots: SlotCache, ids: torch.Tensor) -> None:
        """Keep the states after a part of the prompt. slots: that have read it. ids: [1, n + 1] int64, the part and the next
        token."""
        marked = Session(self.config, self.model)
        marked.keep_copy(slots, ids, None)
        self.left.append(marked)

    def keep(self, slots: SlotCache, ids: torch.Tensor, kept: Any) -> None:
        """Leave what the call has read. slots: the target's. ids: its text, [1, L] int64. kept: the drafter with its state."""
        drafting = kept[1]
        if drafting is None or not drafting.nbytes:
            kept = None
        if can_go_on(slots):
            self.session.keep(slots, ids, kept)
        else:
            self.session.keep_copy(slots, ids, kept)
            slots.drop()
        self.left.append(self.session)


def _nbytes_of(entries: Iterable[_Entry]) -> int:
    """Bytes of stored texts. What several have in common counts once."""
    sessions = [entry.session for entry in entries]
    segments = {id(one): one for session in sessions for one in session.segments}
    return sum(one.nbytes for one in sessions) + sum(one.nbytes for one in segments.values())


def _share(text: _Entry, entries: list[_Entry]) -> None:
    """Let a text and others hold once what they have in common. Those that hold it themselves are divided, unless calls read
    it.

    entries: all texts.
    """
    known = ((one, text.in_common(one)) for one in entries if one is not text)
    for one, shared in sorted(known, key=lambda found: found[1], reverse=True):
        whole = [both for both in (text, one) if not both.session.segments]
        if shared < LEAST or any(both.readers for both in whole):
            continue
        if len(whole) == 2:
            whole.pop().session.cut(shared)
        for own in whole:
            before = _beginning(one if own is text else text, shared, entries)
            own.session.cut(sum(segment.width for segment in before), before)


def _beginning(text: _Entry, shared: int, entries: list[_Entry]) -> list[Segment]:
    """The segments of a text with its first `shared` columns. One that ends after them is split in all texts, unless only a few
    of its columns are among them.

    entries: all texts.
    """
    found: list[Segment] = []
    for segment in text.session.segments:
        if shared < min(segment.width, LEAST):
            break
        if shared < segment.width:
            parts = segment.split(shared)
            for session in (one.session for one in entries):
                each = (parts if one is segment else (one,) for one in session.segments)
                session.segments = [part for of_one in each for part in of_one]
            segment = parts[0]
        found.append(segment)
        shared -= segment.width
    return found


def _replaces(new: _Entry, old: _Entry) -> bool:
    """Whether an older text adds nothing to a new one."""
    if new.model() is not old.model() or new.shared(old.text) < len(old.text):
        return False
    return len(old.text) == len(new.text) or (old.session.in_slots and new.session.in_slots)


def require_pool(sessions: Any) -> SessionPool | None:
    """The argument `sessions`. Raises ValueError for anything but a pool or None."""
    if sessions is not None and not isinstance(sessions, SessionPool):
        raise ValueError(f"sessions: {sessions!r} is not a pool; pass assisted.SessionPool(), or None")
    return sessions
