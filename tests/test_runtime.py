"""CachedModel: whatever was placed, committed and rewound before, logits are those of each row's text alone."""

import functools
import sys

import pytest
import torch
from architectures import ARCHITECTURES, REFUSED, SPECIAL, VOCABULARY, build, half_right, random_ids
from covering import over
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.engine.hooks import is_untouched
from assisted.engine.prepared import PreparedModule
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits, require_rewindable
from assisted.fast.fused import is_sum_of_parts

ROUNDING = 1e-3  # float32 sums in another order; a wrong mask or slot shows at 0.1 and more
LIMIT = 80
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + REFUSED}
TREES = ["llama", "mistral-window", "gemma2", "gemma3", "gpt2", "deepseek_v3"]
CHAINS = ["bloom", "mpt", "falcon-alibi", "gpt_neo", "llama4"]  # these read 2-D masks only

any_example = settings(max_examples=25, deadline=None)


@functools.cache
def model_of(name):
    return build(BY_NAME[name]).requires_grad_(False)


def alone(model, texts):
    """Logits [N, longest, V] of whole texts, each from its first token on: what follows a token does not touch them."""
    longest = max(map(len, texts))
    return model(torch.tensor([text + [0] * (longest - len(text)) for text in texts]), use_cache=False).logits


class Rows:
    """Random rounds over a left-padded batch, and each row's text so far."""

    def __init__(self, model, data):
        self.data = data
        self.model = model
        masks = Traits.of(self.model).masks
        rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))  # windows are of 8 tokens
        self.random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        ids = self.tokens(rows, width)
        self.padding = [data.draw(st.integers(0, width - 1)) for _ in range(rows)]
        mask = (torch.arange(width) >= torch.tensor(self.padding)[:, None]).long()
        self.texts = [row[padding:] for row, padding in zip(ids.tolist(), self.padding, strict=True)]
        self.cached = CachedModel(self.model, SlotCache(rows, LIMIT, right_aligned=not masks.trees), masks)
        self.cache = self.cached.cache
        logits = self.cached.prefill(ids * mask, mask if mask.sum() < mask.numel() else None)
        assert logits.shape == (rows, 1, VOCABULARY)
        self.same(logits, [[text] for text in self.texts])
        self.check()

    def tokens(self, *shape):
        return torch.randint(max(SPECIAL.values()) + 1, VOCABULARY, shape, generator=self.random)

    def same(self, logits, texts):
        """logits: [B, n, V]; texts: what column i of row b stands at the end of."""
        flat = [text for row in texts for text in row]
        expected = alone(self.model, flat)[range(len(flat)), [len(text) - 1 for text in flat]]
        assert (logits.flatten(0, 1) - expected).abs().max() < ROUNDING

    def chain(self):
        width = self.data.draw(st.integers(1, 4))
        ids = self.tokens(len(self.texts), width)
        new = ids.tolist()
        logits = self.cached(ids)
        texts = [[text + row[: i + 1] for i in range(width)] for text, row in zip(self.texts, new, strict=True)]
        self.same(logits, texts)
        counts = [self.data.draw(st.integers(0, width)) for _ in new]
        self.cache.commit(counts)
        self.texts = [text + row[:count] for text, row, count in zip(self.texts, new, counts, strict=True)]

    def rewind(self):
        keep = [self.data.draw(st.integers(1, len(text))) for text in self.texts]
        self.cache.rewind([padding + n for padding, n in zip(self.padding, keep, strict=True)])
        self.texts = [text[:n] for text, n in zip(self.texts, keep, strict=True)]

    def check(self):
        """A slot for each token of a row's text, holding the keys and values of reading that text from the start."""
        assert self.cache.known == [padding + len(text) for padding, text in zip(self.padding, self.texts, strict=True)]
        assert self.cache.unpadded == [len(text) for text in self.texts]
        for row, text in enumerate(self.texts):
            fresh = DynamicCache()
            self.model(torch.tensor([text]), past_key_values=fresh, use_cache=True)
            slots = slice(self.cache.lengths[row] - len(text), self.cache.lengths[row])
            for ours, theirs in zip(self.cache.layers, fresh.layers, strict=True):
                assert (ours.keys[row, :, slots] - theirs.keys[0]).abs().max() < ROUNDING
                assert (ours.values[row, :, slots] - theirs.values[0]).abs().max() < ROUNDING


@pytest.mark.parametrize("name", CHAINS)
@any_example
@given(data=st.data())
def test_random_rounds_of_chains_right_aligned(name, data):
    rows = Rows(model_of(name), data)
    assert rows.cache.right_aligned
    for _ in range(data.draw(st.integers(1, 5))):
        data.draw(st.sampled_from([rows.chain, rows.rewind]))()
    rows.chain()
    rows.check()


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_chain_is_a_tree_of_only_children(name):
    """Also where the draft says that it is a chain, and for one row, which needs no mask."""
    model = model_of(name)
    masks = Traits.of(model).masks
    ids = torch.arange(10, 24)[None]
    for parents in (None, torch.tensor([[-1, 0, 1]])) if masks.trees else (None,):
        cached = CachedModel(model, SlotCache(1, LIMIT, not masks.trees), masks)
        cached.prefill(ids[:, :10], None)
        logits = cached(ids[:, 10:], Draft(ids[:, 11:], torch.tensor([3]), parents=parents))
        assert (logits - model(ids).logits[:, 10:]).abs().max() < ROUNDING


@pytest.mark.parametrize("name", TREES + CHAINS)
@pytest.mark.parametrize("padding", [0, 4])
def test_one_token_of_one_row(name, padding):
    """The plain round: where nothing is hidden it goes without a mask."""
    model = model_of(name)
    masks = Traits.of(model).masks
    cached = CachedModel(model, SlotCache(1, LIMIT, not masks.trees), masks)
    ids = torch.arange(5, 25)[None]
    mask = torch.cat([torch.zeros(1, padding), torch.ones(1, 17)], 1).long()
    cached.prefill(torch.nn.functional.pad(ids[:, :17], (padding, 0)), mask if padding else None)
    whole = model(ids).logits
    for column in range(17, 20):
        assert (cached(ids[:, column, None])[:, 0] - whole[:, column]).abs().max() < ROUNDING
        cached.cache.commit([1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "bloom", "gpt_neo"])
@pytest.mark.parametrize("width", [5, 20])
def test_from_and_to_a_callers_cache(name, width):
    """A text read into a DynamicCache, gone on with in slots, and again in the DynamicCache they are given back as."""
    model = model_of(name)
    masks = Traits.of(model).masks
    config = model.config
    ids = torch.arange(3, 3 + 2 * (width + 8)).view(2, -1) % VOCABULARY
    whole = model(ids, use_cache=False).logits
    given = DynamicCache(config=config)
    model(ids[:, :width], past_key_values=given, use_cache=True)
    cached = CachedModel(model, SlotCache.of(given, 2, LIMIT, right_aligned=not masks.trees), masks)
    cached.cache.begin_rounds()
    for start, stop, keep in ((width, width + 4, 3), (width + 3, width + 5, 2)):
        assert (cached(ids[:, start:stop]) - whole[:, start:stop]).abs().max() < ROUNDING
        cached.cache.commit([keep, keep])
    back = cached.cache.to_dynamic(config)
    for column in range(width + 5, width + 8):
        logits = model(ids[:, column : column + 1], past_key_values=back, use_cache=True).logits[:, 0]
        assert (logits - whole[:, column]).abs().max() < ROUNDING


@over("architecture", ARCHITECTURES)
def test_masks_are_what_the_architecture_reads(architecture):
    config = architecture.make()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=architecture.attention)
    masks = Traits.of(model).masks
    chunked = getattr(config, "attention_chunk_size", None) is not None
    assert masks.trees == (architecture.masks != "2d" and not chunked)
    if masks.trees:
        full, sliding = {"full_attention": None}, {"sliding_attention": getattr(config, "sliding_window", None)}
        assert masks.windows == {"4d": full, "window": sliding, "dict": full | sliding}[architecture.masks]
        assert masks.additive == (architecture.attention == "eager")


def test_an_attention_without_4d_masks_keeps_rows_right_aligned():
    model = build(BY_NAME["llama"])
    model.config._attn_implementation = "flash_attention_2"
    assert not Traits.of(model).masks.trees


@pytest.mark.parametrize(("name", "limit"), [("llama", 256), ("gpt2", 256), ("mpt", 2048), ("bloom", sys.maxsize)])
def test_room_ends_with_the_context(name, limit):
    model = model_of(name)
    masks = Traits.of(model).masks
    cached = CachedModel(model, SlotCache(2, LIMIT, not masks.trees), masks)
    assert cached.room([3, 7, 5]) == limit - 7
    cached.prefill(torch.full((2, 20), 5), None)
    # aligned rows need the slots of the longest one, with its last token, even when it has ended
    assert cached.room([3, 7]) == limit - (7 if masks.trees else 21)
    assert cached.room([3, 30]) == limit - 30


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_columns_that_do_not_matter_may_lie_behind_the_context(name):
    """These models know no position behind their context's end."""
    model = build(BY_NAME[name], max_position_embeddings=16).requires_grad_(False)
    cached = CachedModel(model, SlotCache(2, LIMIT), Traits.of(model).masks)
    ids = torch.arange(10, 42).view(2, 16)
    cached.prefill(ids[:, :14], None)
    cached.cache.rewind([14, 10])
    logits = cached(torch.stack([ids[0, [14, 15, 0, 0, 0]], ids[1, 10:15]]), used=[2, 5])
    assert (logits[0, :2] - model(ids[:1]).logits[0, 14:]).abs().max() < ROUNDING
    assert (logits[1] - model(ids[1:]).logits[0, 10:15]).abs().max() < ROUNDING


@pytest.mark.parametrize("name", TREES + CHAINS)
def test_what_can_be_rewound_is_not(name):
    require_rewindable(model_of(name), "target")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "olmo2", "phi3"])
def test_a_bare_model_computes_what_its_forward_computes(name):
    model = build(BY_NAME[name]).requires_grad_(False)
    assert is_untouched(model) and is_sum_of_parts(model)
    logits = []
    for through_parts in (False, True):
        runner = CachedModel(PreparedModule(model, through_parts), SlotCache(1, LIMIT), Traits.of(model).masks)
        runner.prefill(torch.arange(3, 15)[None], None)
        logits.append(runner(torch.tensor([[20, 21, 22]])))
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("granite", {"embedding_multiplier": 3.0}),
        ("granite", {"logits_scaling": 3.0}),
        ("gpt2", {}),
        ("qwen2-window", {}),
    ],
)
def test_a_model_that_is_more_than_its_parts_runs_through_its_forward(name, fields):
    """These scale embeddings or logits, have parts of other names, or read several masks."""
    assert not is_sum_of_parts(build(BY_NAME[name], **fields))


def test_a_hook_is_honoured():
    model = build(BY_NAME["llama"])
    model.register_forward_hook(lambda *args: None)
    assert not is_untouched(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_rows_that_do_not_run_keep_what_they_hold(name):
    """Rows leave and come back in any order; what the others say is what they say in company, trees included."""
    model = build(BY_NAME[name])
    masks = Traits.of(model).masks
    ids, mask = random_ids(model, 4, 9), torch.ones(4, 9, dtype=torch.int64)
    mask[1, :4] = 0
    alone, company = (CachedModel(model, SlotCache(4, 64), masks) for _ in range(2))
    for run in (alone, company):
        run.prefill(ids, mask)
    tree = Draft(random_ids(model, 4, 3, seed=5), torch.full((4,), 3), parents=torch.tensor([[-1, -1, 1]] * 4))
    path = [[0, 2, 3], [0, 1, 1], [0, 2, 2], [0, 1, 0]]
    for seed, rows in enumerate([[0, 1, 3], [3, 1], [1], [0, 1, 2, 3]]):
        alone.run_only(rows)
        columns = random_ids(model, 4, 4, seed=seed)
        draft = Draft(columns[:, 1:], tree.lengths, parents=tree.parents)
        narrow, wide = alone(columns, draft), company(columns, draft)
        assert narrow.shape == wide.shape
        assert torch.allclose(narrow[rows], wide[rows], atol=1e-4)
        counts = [1 + row % 2 if row in rows else 0 for row in range(4)]
        for run in (alone, company):
            run.commit(counts, [columns[: max(counts)] for columns in path])
        assert alone.cache.known == company.cache.known
    config = model.config.get_text_config(decoder=True)
    for one, two in zip(alone.cache.to_dynamic(config).layers, company.cache.to_dynamic(config).layers, strict=True):
        assert torch.allclose(one.keys, two.keys, atol=1e-4)
        assert torch.allclose(one.values, two.values, atol=1e-4)


def test_rows_that_have_ended_are_not_computed(monkeypatch):
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=3)
    ids = random_ids(target, 4, 12, seed=4)
    passes = []
    forward = CachedModel._forward
    monkeypatch.setattr(
        CachedModel, "_forward", lambda self, ids, kwargs: passes.append(len(ids)) or forward(self, ids, kwargs)
    )
    kwargs = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": list(range(40))}
    out = model.generate(ids, **kwargs, return_dict_in_generate=True)
    plain = target.generate(ids, **kwargs, return_dict_in_generate=True)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert min(passes) < 4  # passes over fewer rows
    for one, two in zip(out.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert torch.allclose(one.keys, two.keys, atol=1e-4)
