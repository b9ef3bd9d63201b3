"""Weights that are read ahead: the same ones, in the order of the forward pass, and the model is afterwards as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import random_ids
from pairs import CALL
from test_offloaded import beside, fresh, on_disk, partly_on_disk

from assisted import AssistedModelForCausalLM
from assisted.engine.hooks import is_offloaded, offloading_hooks
from assisted.engine.prefetch import Ahead, prefetching


class Disk(Mapping[str, torch.Tensor]):
    """Makes every weight anew when it is read, and notes which, and whether the caller's own thread read it."""

    def __init__(self, names: str, broken: str = ""):
        self.names, self.broken = names, broken
        self.read: list[tuple[str, bool]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        own = threading.current_thread() is threading.main_thread()
        self.read.append((name, own))
        if name in self.broken and not own:
            raise OSError(name)
        return torch.full((4,), float(self.names.index(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def needs(ahead: Ahead, disk: Disk, order: str) -> None:
    """A forward pass that needs these weights, and gets the right ones."""
    for name in order:
        assert ahead.fetch(disk, (0, name), False).tolist() == [float(disk.names.index(name))] * 4


def test_from_the_second_pass_on_a_thread_reads_in_order_and_wraps_around() -> None:
    disk = Disk("abcd")
    ahead = Ahead(2, print)
    needs(ahead, disk, "abcd")
    disk.read.clear()
    for _ in range(3):
        needs(ahead, disk, "abcd")
    ahead.close()
    # the first weight of the second pass was not predicted yet
    assert disk.read[0] == ("a", True)
    by_thread = [name for name, own in disk.read[1:]]
    assert not any(own for _, own in disk.read[1:])
    assert "".join(by_thread).startswith("bcdabcdabcd")
    assert (ahead.hits, ahead.misses) == (11, 1)


def test_no_more_is_held_than_an_average_layer_has() -> None:
    disk = Disk("abcdef")
    ahead = Ahead(3, print)
    for _ in range(3):
        for name in "abcdef":
            ahead.fetch(disk, (0, name), False)
            assert len({*ahead.wanted, *ahead.ready}) <= 2
    ahead.close()
    assert not ahead.ready


def test_another_order_drops_what_was_read() -> None:
    """As where a draft uses the first layers several times before the target runs."""
    disk = Disk("abcdef")
    ahead = Ahead(3, print)
    for order in ("abcdef", "abcdef", "ab", "ab", "abcdef", "acbdfe", "abcdef"):
        needs(ahead, disk, order)
    ahead.close()
    assert ahead.hits > 0
    assert ahead.misses > 1


def test_a_weight_that_the_thread_cannot_read_is_read_by_the_one_who_needs_it() -> None:
    disk, noted = Disk("abc", broken="b"), []
    ahead = Ahead(1, noted.append)
    for _ in range(3):
        needs(ahead, disk, "abc")
    ahead.close()
    assert ahead.misses >= 2
    assert set(noted) == {"weights are not read ahead from the disk (OSError: b)"}


def test_weights_in_main_memory_are_not_copied() -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    ahead = Ahead(1, print)
    for _ in range(3):
        for name, weight in weights.items():
            assert ahead.fetch(weights, (0, name), False) is weight
    ahead.close()
    assert ahead.thread is None


@pytest.mark.parametrize("place", [on_disk, beside, partly_on_disk], ids=lambda place: place.__name__)
def test_a_call_reads_ahead_and_leaves_no_trace(place: Any, tmp_path: Path) -> None:
    target = place(tmp_path)
    assert is_offloaded(target)
    ids = random_ids(target, 1, 8, seed=2)
    plain = target.generate(ids, **CALL)
    before = [(hook, hook.weights_map) for hook in offloading_hooks(target)]
    model = AssistedModelForCausalLM.from_models(target, draft="ngram", draft_length=2)
    threads = threading.active_count()
    assert model.generate(ids, **CALL).tolist() == plain.tolist()

    def fails(*args: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **CALL, streamer=SimpleNamespace(put=fails, end=lambda: None))
    assert all(hook.weights_map is weights for hook, weights in before)
    assert threading.active_count() == threads
    assert target.generate(ids, **CALL).tolist() == plain.tolist()


def test_forward_passes_of_a_model_on_disk_are_read_ahead(tmp_path: Path) -> None:
    target = on_disk(tmp_path)
    ids = random_ids(target, 1, 8, seed=2)
    expected = fresh()(ids).logits
    with prefetching(target, print) as ahead, torch.no_grad():
        assert ahead is not None
        for _ in range(3):
            assert torch.equal(target(ids).logits, expected)
        with prefetching(target, print) as second:  # a call in another thread
            assert second is None
    weights = sum(1 for _ in target.parameters())
    assert ahead.hits == 2 * weights - 1


def test_a_model_in_memory_has_nothing_to_read() -> None:
    with prefetching(fresh(), print) as ahead:
        assert ahead is None
