"""Reads the next weights of an offloaded model from the disk while the present ones compute.

accelerate's hooks read a module's weights at the moment when it is called, and the processor waits. Here, a thread reads ahead,
in the order that the last forward pass had. The hooks stay; only the mapping that each reads from is wrapped during a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .hooks import offloading_hooks

_ENTERING = threading.Lock()
Key = tuple[int, str]  # of a hook, in the order of the modules, and of a weight


@contextmanager
def prefetching(model: nn.Module, note: Callable[[str], None]) -> Iterator[Ahead | None]:
    """A context in which the weights that lie on a disk are read ahead. Yields None if there are none.

    note: called with what went wrong, if a weight cannot be read ahead. Two calls at the same time share the hooks; only the
    first one reads ahead.
    """
    hooks = [hook for hook in offloading_hooks(model) if not getattr(hook, "tied_params_names", ())]
    with _ENTERING:
        if not hooks or any(isinstance(hook.weights_map, _Wrapped) for hook in hooks):
            ahead = None
        else:
            config: Any = model.config
            ahead = Ahead(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1), note)
            before = [hook.weights_map for hook in hooks]
            for number, hook in enumerate(hooks):
                hook.weights_map = _Wrapped(hook.weights_map, ahead, number, hook.execution_device)
    if ahead is None:
        yield None
        return
    try:
        yield ahead
    finally:
        ahead.close()
        for hook, weights in zip(hooks, before, strict=True):
            hook.weights_map = weights


class Ahead:
    """What is read next, and the thread that reads it.

    Each weight predicts the one that was read after it the last time; the last of a forward pass predicts the first of the
    next, which is read while the draft works. As many bytes are held as an average layer has, besides those in use. If another
    weight is needed than predicted, as with experts or with drafts from the target's first layers, what was read ahead is
    dropped.

    Args:
        layers: of the model.
        note: called with what went wrong, if a weight cannot be read ahead.

    Attributes:
        hits, misses: number of weights that were read ahead, or by the one who needed them.
    """

    def __init__(self, layers: int, note: Callable[[str], None]):
        self.layers, self.note = max(1, layers), note
        self.hits = self.misses = 0
        self.after: dict[Key, Key] = {}
        self.sources: dict[Key, tuple[Mapping[str, Any], bool]] = {}  # where to read it from; whether for a CUDA device
        self.sizes: dict[Key, int] = {}
        self.last: Key | None = None
        self.wanted: list[Key] = []  # in order; the first one may be being read
        self.ready: dict[Key, torch.Tensor] = {}
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.closed = False

    def fetch(self, weights: Mapping[str, Any], key: Key, for_cuda: bool) -> Any:
        """A weight. weights: the mapping that has it. for_cuda: it will be copied to a CUDA device."""
        with self.changed:
            if self.closed:
                return weights[key[1]]
            if self.last is not None:
                self.after[self.last] = key
            self.last = key
            found = self._taken(key)
            self._plan(key)
        if found is not None:
            return found
        value = weights[key[1]]
        if key not in self.sizes:
            on_disk = isinstance(value, torch.Tensor) and not _in_memory(weights, key[1])
            with self.changed:
                self.sources[key] = weights, for_cuda
                self.sizes[key] = value.nbytes if on_disk else 0
        return value

    def close(self) -> None:
        """Stop the thread and release what it has read."""
        with self.changed:
            self.closed = True
            self.wanted, self.ready = [], {}
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()

    def _taken(self, key: Key) -> torch.Tensor | None:
        """What was read ahead for this key; waits until it is ready. None if it was not predicted."""
        if not self.sizes.get(key):
            return None
        while key in self.wanted:
            self.changed.wait()
        found = self.ready.pop(key, None)
        if found is None:
            self.misses += 1
            self.wanted, self.ready = [], {}
        else:
            self.hits += 1
        return found

    def _plan(self, key: Key) -> None:
        """Predict what is needed after this key, as far as there is room."""
        if self.misses > self.hits + 2 * len(self.sizes):  # unpredictable: reading ahead only costs time
            self.wanted, self.ready = [], {}
            return
        planned = [*self.ready, *self.wanted]
        held = sum(self.sizes[other] for other in planned)
        room = max(max(self.sizes.values(), default=0), sum(self.sizes.values()) // self.layers)
        here = planned[-1] if planned else key
        while (here := self.after.get(here, key)) != key and here not in planned and here in self.sizes:
            if held + self.sizes[here] > room:
                break
            held += self.sizes[here]
            planned.append(here)
            if self.sizes[here]:
                self.wanted.append(here)
        if self.wanted:
            if self.thread is None:
                self.thread = threading.Thread(target=self._read, name="assisted-prefetch", daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def _read(self) -> None:
        """Read what is wanted, until closed. A weight that cannot be read is left to the one who needs it."""
        while True:
            with self.changed:
                while not self.wanted and not self.closed:
                    self.changed.wait()
                if self.closed:
                    return
                wanted = self.wanted
                key = wanted[0]
                weights, for_cuda = self.sources[key]
            try:
                mapped = weights[key[1]]  # a view of the file: copying it is what reads it
                read = torch.empty(mapped.shape, dtype=mapped.dtype, pin_memory=for_cuda).copy_(mapped)
            except Exception as error:
                self.note(f"weights are not read ahead from the disk ({type(error).__name__}: {error})")
                read = None
            with self.changed:
                if self.wanted is wanted:  # otherwise the prediction was wrong
                    wanted.pop(0)
                    if read is not None:
                        self.ready[key] = read
                    self.changed.notify_all()


def _in_memory(weights: Any, name: str) -> bool:
    """Whether a weight lies in main memory, so that there is nothing to read."""
    while hasattr(weights, "prefix"):  # accelerate's mappings: a part of all names, and of memory and files
        name, weights = f"{weights.prefix}{name}", weights.dataset
    return name in (weights if isinstance(weights, dict) else getattr(weights, "state_dict", {}))


class _Wrapped(Mapping[str, Any]):
    """A hook's mapping during a call."""

    def __init__(self, weights: Mapping[str, Any], ahead: Ahead, number: int, device: Any):
        self.weights, self.ahead, self.number = weights, ahead, number
        self.for_cuda = device is not None and torch.device(device).type == "cuda"

    def __getitem__(self, name: str) -> Any:
        return self.ahead.fetch(self.weights, (self.number, name), self.for_cuda)

    def __contains__(self, name: object) -> bool:
        return name in self.weights  # without reading it ahead

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)
