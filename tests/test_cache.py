"""SlotCache against plain lists: made-up keys and values, each its own number, are where the rows' texts say.

No models here; what attention makes of the slots is in test_runtime.py.
"""

import math
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, REFUSED, WINDOW
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from assisted.core.host import zeros
from assisted.engine import cache as module
from assisted.engine.cache import SlotCache
from assisted.engine.traits import Traits
from assisted.methods.layer_skip import borrowed

CPU = torch.device("cpu")
LAYERS, HEADS = 2, 2
LIMIT = 120
CONFIGS = {
    architecture.name: architecture.make(num_hidden_layers=LAYERS)
    for architecture in ARCHITECTURES
    if architecture.name in ("llama", "gemma3", "mistral-window")
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
by_alignment = pytest.mark.parametrize("right_aligned", [False, True], ids=["left", "right"])


def states(numbers):
    """Keys [B, H, n, 3] and values [B, H, n, 2] that tell which number they came with. numbers: [B, n]"""
    by_head = numbers.float()[:, None, :, None] + 0.25 * torch.arange(HEADS)[:, None, None]
    return by_head.expand(-1, -1, -1, 3), -by_head.expand(-1, -1, -1, 2)


def write(cache, numbers):
    """What a forward does. Returns what the last layer's attention would look at."""
    for layer in range(LAYERS):
        seen = cache.update(*states(numbers + 1000 * layer), layer)
    return seen


class Rows:
    """Random rounds over a left-padded batch, and the numbers that each row's slots should hold."""

    def __init__(self, data, right_aligned):
        self.data = data
        rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
        self.count = 0
        prompt = self.new(rows, width)
        self.padding = [data.draw(st.integers(0, width - 1)) for _ in range(rows)]
        mask = torch.arange(width) >= torch.tensor(self.padding)[:, None]
        self.held = [numbers[padding:] for numbers, padding in zip(prompt.tolist(), self.padding, strict=True)]
        self.cache = SlotCache(rows, LIMIT, right_aligned)
        self.cache.hide(data.draw(st.sampled_from([mask, mask.long()])))
        half = data.draw(st.integers(0, width))  # a prompt may be read in pieces
        for piece in (prompt[:, :half], prompt[:, half:]):
            if piece.shape[1]:
                write(self.cache, piece)
        assert self.cache.get_seq_length() == width
        self.cache.begin_rounds()

    def new(self, rows, width):
        self.count += rows * width
        return torch.arange(self.count - rows * width, self.count).view(rows, width) + 1

    def forward(self, width):
        numbers = self.new(self.cache.rows, width)
        self.cache.place(width, CPU)
        sizes = self.cache.get_mask_sizes(width, 0)
        keys, values = write(self.cache, numbers)
        assert sizes == (keys.shape[2], 0)
        assert keys.shape[2] == values.shape[2] == max(self.cache.lengths) + width
        for row, length in enumerate(self.cache.lengths):
            expected = states(numbers[row : row + 1] + 1000 * (LAYERS - 1))
            assert torch.equal(keys[row, :, length : length + width], expected[0][0])
            assert torch.equal(values[row, :, length : length + width], expected[1][0])
        return numbers.tolist()

    def chain(self):
        width = self.data.draw(st.integers(1, 4))
        numbers = self.forward(width)
        counts = [self.data.draw(st.integers(0, width)) for _ in numbers]
        self.cache.commit(counts)
        for held, new, count in zip(self.held, numbers, counts, strict=True):
            held += new[:count]

    def tree(self):
        width = self.data.draw(st.integers(1, 5))
        numbers = self.forward(width)
        paths = [sorted(self.data.draw(st.sets(st.integers(0, width - 1)))) for _ in numbers]
        more = [path + [0] * self.data.draw(st.integers(0, 1)) for path in paths]  # columns that do not count
        self.cache.commit([len(path) for path in paths], more)
        for held, new, path in zip(self.held, numbers, paths, strict=True):
            held += [new[column] for column in path]

    def rewind(self):
        keep = [self.data.draw(st.integers(1, len(held))) for held in self.held]
        self.cache.rewind([padding + n for padding, n in zip(self.padding, keep, strict=True)])
        self.held = [held[:n] for held, n in zip(self.held, keep, strict=True)]

    def check(self):
        cache = self.cache
        assert cache.known == [padding + len(held) for padding, held in zip(self.padding, self.held, strict=True)]
        assert cache.unpadded == [len(held) for held in self.held]
        assert cache.get_seq_length() == max(cache.lengths)
        if cache.right_aligned:
            assert cache.lengths == [max(cache.known)] * cache.rows  # never further than the longest text
            self.check_mask()
        else:
            assert cache.lengths == cache.known
        self.check_numbers(cache.layers, cache.lengths)

    def check_numbers(self, layers, ends):
        for number, layer in enumerate(layers):
            for row, (held, end) in enumerate(zip(self.held, ends, strict=True)):
                keys, values = states(torch.tensor([held]) + 1000 * number)
                assert torch.equal(layer.keys[row, :, end - len(held) : end], keys[0])
                assert torch.equal(layer.values[row, :, end - len(held) : end], values[0])

    def check_given_back(self):
        """As columns of the text, whatever aligning moved; zeros behind rows that are shorter."""
        back = self.cache.to_dynamic(None)
        assert back.get_seq_length() == max(self.cache.known)
        self.check_numbers(back.layers, self.cache.known)
        for layer in back.layers:
            for row, known in enumerate(self.cache.known):
                assert not layer.keys[row, :, known:].any()
                assert not layer.values[row, :, known:].any()

    def check_mask(self):
        top = max(self.cache.lengths) + 2
        mask = self.cache.mask(2, CPU)
        if mask is None:
            assert all(len(held) + 2 == top for held in self.held)
        else:
            hidden = [top - 2 - len(held) for held in self.held]
            assert mask.tolist() == [[0] * n + [1] * (top - n) for n in hidden]


@by_alignment
@pytest.mark.parametrize("growth", [1, 512])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_slots_hold_each_rows_text(growth, right_aligned, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GROWTH", growth)
        rows = Rows(data, right_aligned)
        steps = [rows.chain, rows.rewind] if right_aligned else [rows.chain, rows.tree, rows.rewind]
        stores = [(layer.keys, layer.values) for layer in rows.cache.layers]
        rows.check()
        for _ in range(data.draw(st.integers(1, 8))):
            data.draw(st.sampled_from(steps))()
            rows.check()
        rows.check_given_back()
        assert rows.cache.capacity <= LIMIT
        if growth == 512:  # room for everything from the start
            for layer, (keys, values) in zip(rows.cache.layers, stores, strict=True):
                assert layer.keys is keys
                assert layer.values is values


def filled(rows, width, right_aligned=False, limit=LIMIT):
    """Slots of a prompt without padding."""
    cache = SlotCache(rows, limit, right_aligned)
    write(cache, 1 + columns(0, width, rows))
    cache.begin_rounds()
    return cache


def test_rewinding_left_aligned_rows_writes_nothing():
    cache = filled(3, 9)
    cache.commit([0, 0, 0])
    written = [(store, store._version) for layer in cache.layers for store in (layer.keys, layer.values)]
    cache.rewind([4, 9, 1])
    with cache.borrowed():  # what is committed within it is discarded
        cache.commit([2, 1, 0])
        assert cache.known == [6, 10, 1]
    assert cache.known == [4, 9, 1]
    cache.rewind([4, 2, 1])
    assert cache.lengths == [4, 2, 1]
    now = [store for layer in cache.layers for store in (layer.keys, layer.values)]
    for (before, version), after in zip(written, now, strict=True):
        assert after is before
        assert after._version == version


def test_right_aligned_rows_move_only_where_they_differ():
    cache = filled(2, 6, right_aligned=True)
    cache.place(3, CPU)
    write(cache, torch.zeros(2, 3))
    version = cache.layers[0].keys._version
    cache.commit([2, 2])
    cache.rewind([7, 7])
    assert cache.layers[0].keys._version == version
    assert cache.mask(1, CPU) is None
    cache.rewind([7, 5])
    assert cache.layers[0].keys._version > version
    assert cache.mask(1, CPU).tolist() == [[1] * 8, [0, 0] + [1] * 6]


@by_alignment
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_borrowed_columns_come_back(right_aligned, error):
    cache = filled(2, 9, right_aligned=right_aligned)
    cache.rewind([9, 9] if right_aligned else [9, 6])
    tops = list(cache.lengths)
    stores = [store for layer in cache.layers for store in (layer.keys, layer.values)]
    before = [store.clone() for store in stores]
    with pytest.raises(error) if error else nullcontext(), borrowed(cache, 4):
        assert cache.lengths == [top - 4 for top in tops]
        cache.place(4, CPU)
        write(cache, torch.zeros(2, 4))
        assert not torch.equal(stores[0], before[0])
        if error:
            raise error
    assert cache.lengths == tops
    for store, old in zip(stores, before, strict=True):
        for row, top in enumerate(tops):
            assert torch.equal(store[row, :, :top], old[row, :, :top])


def test_memory_grows_by_doubling():
    end, width = 20_000, 16
    cache = SlotCache(1, limit=10**9)
    cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    cache.begin_rounds()
    stores = [cache.layers[0].keys]
    while cache.lengths[0] < end:
        cache.place(width, CPU)
        columns = (cache.lengths[0] + torch.arange(float(width)))[None, None, :, None]
        cache.update(columns, columns, 0)
        cache.commit([width])
        if cache.layers[0].keys is not stores[-1]:
            stores.append(cache.layers[0].keys)
    assert 2 < len(stores) <= 2 + math.log2(end / module._GROWTH)
    assert cache.capacity < 2 * (end + width)
    length = cache.lengths[0]
    assert torch.equal(cache.layers[0].keys[0, 0, :length, 0], torch.arange(float(length)))


def test_memory_never_passes_the_limit_unless_it_must():
    cache = SlotCache(1, limit=700)
    sizes = []
    for top in (10, 522, 523, 700, 705):
        cache.reserve(top)
        sizes.append(cache.capacity)
    assert sizes == [522, 522, 700, 700, 705]


@pytest.mark.parametrize("mask", [None, torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)])
def test_a_prompt_without_padding_hides_nothing(mask):
    cache = SlotCache(2, LIMIT)
    cache.hide(mask)
    assert cache.visible is None
    assert cache.padding == [0, 0]


def columns(start, stop, rows=2):
    """The numbers of some columns of a batch."""
    return 100 * torch.arange(rows)[:, None] + torch.arange(start, stop)


def dynamic(config, prompt, more=0):
    """transformers' own cache after a prompt and `more` single columns."""
    cache = DynamicCache(config=config)
    write(cache, columns(0, prompt))
    for column in range(prompt, prompt + more):
        write(cache, columns(column, column + 1))
    return cache


def contents(cache):
    return [(type(layer), layer.keys.tolist(), layer.values.tolist()) for layer in cache.layers if layer.is_initialized]


@by_config
@pytest.mark.parametrize("prompt", [3, WINDOW - 1, WINDOW, 20])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_there_and_back(config, prompt, more):
    """Slots filled from a caller's cache, gone on with and given back, are the caller's cache gone on with."""
    given = dynamic(config, prompt)
    before = contents(given)
    slots = SlotCache.of(given, 2, LIMIT)
    slots.begin_rounds()
    assert slots.lengths == [prompt, prompt]
    if more:
        slots.place(more + 1, CPU)
        write(slots, columns(prompt, prompt + more + 1))
        slots.commit([more, more])
    back = slots.to_dynamic(config)
    assert back.get_seq_length() == prompt + more
    assert contents(back) == contents(dynamic(config, prompt, more))
    assert contents(given) == before


@by_config
def test_slots_made_from_nothing(config):
    for nothing in (None, DynamicCache(config=config)):
        slots = SlotCache.of(nothing, 2, LIMIT)
        assert slots.layers == []
        assert slots.get_seq_length() == 0


def test_nothing_is_shared_with_the_callers_caches():
    given = dynamic(CONFIGS["llama"], 4)
    before = contents(given)
    slots = SlotCache.of(given, 2, LIMIT)
    slots.begin_rounds()
    back = slots.to_dynamic(None)
    for layer in slots.layers:
        layer.keys.fill_(7)
        layer.values.fill_(7)
    assert contents(given) == before
    assert contents(back) == before


def test_layers_without_keys_of_their_own_stay_empty():
    """Some models' last layers read what earlier ones wrote."""
    config = ARCHITECTURES[0].make(num_hidden_layers=LAYERS + 1)
    given = dynamic(config, 4)
    slots = SlotCache.of(given, 2, LIMIT)
    slots.begin_rounds()
    back = slots.to_dynamic(config)
    assert [layer.is_initialized for layer in back.layers] == [True] * LAYERS + [False]
    assert contents(back) == contents(given)


@by_config
def test_layers_that_slots_can_hold(config):
    assert Traits.of(AutoModelForCausalLM.from_config(config)).keeps == ()


@pytest.mark.parametrize(
    ("name", "kept"), [("deepseek_v32", "Indexed"), ("qwen3_next", "recurrent state"), ("lfm2", "Linear")]
)
def test_layers_that_slots_cannot_hold(name, kept):
    config = next(architecture for architecture in RECURRENT + REFUSED if architecture.name == name).make()
    found = Traits.of(AutoModelForCausalLM.from_config(config)).keeps
    assert found
    assert kept in " ".join(found)


def test_slots_take_memory_when_they_are_written():
    """Large ones; of every dtype, and of their own in a forked process."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        store = zeros(torch.empty(0, dtype=dtype), (4, 2, 2**16, 8))
        assert store.shape == (4, 2, 2**16, 8) and store.dtype == dtype and not store.any()
        store[1:, :, 3] = 1
        assert store.sum() == 3 * 2 * 8
    if (status := Path("/proc/self/statm")).exists():
        resident = lambda: int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
        before = resident()
        store = zeros(torch.empty(0), (16, 2, 2**16, 16))  # 128 MiB
        store[0] = 1
        assert resident() - before < store.nbytes / 2
        if (child := os.fork()) == 0:
            store.numpy()[1] = 1
            os._exit(0)
        os.waitpid(child, 0)
        assert not store[1].any()
