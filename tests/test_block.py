"""Block drafters: the module against its formula and against transformers' own, and what they draft, in chains and in trees."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from alone import one_and_four, require_chains, rows_of, slots_apart, watched
from architectures import ARCHITECTURES, build
from block_heads import Reference, random_block, trained_block
from covering import in_turns
from eagle_heads import features_of
from pairs import CALL, ENDS, ROUNDING, no_fallback, said_by
from test_sampling import require_distribution, tiny
from transformers import DynamicCache, MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from assisted import AssistedModelForCausalLM, DFlash
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.engine.passes import Inputs
from assisted.lengths.rates import Rates
from assisted.methods import METHODS, parse
from assisted.methods.dflash.config import BlockConfig, block_taps
from assisted.methods.dflash.draft import Block, BlockDrafting, BlockRunner
from assisted.methods.dflash.head import BlockHead
from assisted.methods.dflash.train import after, draft_blocks, teacher_forced
from assisted.methods.eagle import draft as eagle
from assisted.methods.eagle.config import FULL, SLIDING
from assisted.methods.shared.base import Room

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
WINDOW = {"layer_types": (FULL, SLIDING), "sliding_window": 7}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "next token": {"next_token": True, "mask_token_id": 5},
    "sliding": WINDOW,
    "sliding and causal": WINDOW | {"sliding_causal": True},
    "causal": {"causal": True},
    "sinks": WINDOW | {"sinks": True},
    "dspark": {
        "next_token": True,
        "markov": "vanilla",
        "markov_rank": 6,
        "confidence": True,
        "confidence_markov": True,
    },
    "dspark, gated": {"markov": "gated", "markov_rank": 6, "confidence": True},
    "dspark, rnn": {"next_token": True, "markov": "rnn", "markov_rank": 6},
    "dflash2": {"conv_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7},
    "three taps": {"conv_size": 3, "conv_group_size": 16},
    "reduced": {"draft_vocab_size": 40, "own_output": True, "next_token": True},
    "reduced dspark": {"draft_vocab_size": 40, "own_output": True, "markov": "vanilla", "markov_rank": 6},
}

pytestmark = pytest.mark.usefixtures("invariants")


def llama() -> Any:
    return build(BY_NAME["llama"])


def assisted(
    target: Any, head: BlockHead, tree: bool | None = None, draft_length: Any = 4, **options: Any
) -> AssistedModelForCausalLM:
    spec = DFlash(head, tree=tree, **options)
    return AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=draft_length)


def text_of(target: Any, count: int = 12) -> torch.Tensor:
    return one_and_four(target)[0]["input_ids"][:, :count]


@torch.no_grad()
def drafted(target: Any, head: BlockHead, ids: torch.Tensor) -> tuple[BlockRunner, torch.Tensor]:
    """The runner after a text was read, and the states of the block after it."""
    runner = BlockRunner(head, target, SlotCache(len(ids), 64), torch.zeros(len(ids), 1, dtype=torch.int64))
    known = ids.shape[1] - 1
    states = head.fuse(features_of(target, head, ids)[:, :known])
    return runner, runner.read(ids[:, 1:], states, [known] * len(ids))


# ---- the module


@pytest.mark.parametrize("kinds", [(SLIDING, SLIDING), (FULL, SLIDING), (FULL, FULL)], ids=str)
@torch.no_grad()
def test_the_backbone_is_that_of_transformers(kinds):
    """Of Muse Glimmer's assistant, which is a DFlash drafter: its window includes the position a whole window back."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "block_size": 5}
    theirs = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **sizes, layer_types=list(kinds), sliding_window=6, target_layer_ids=[0, 1], rms_norm_eps=1e-6
        )
    ).eval()
    rope = dict(theirs.config.rope_parameters)
    ours = BlockHead(
        BlockConfig(
            **sizes, vocab_size=96, taps=(1, 2), layer_types=kinds, sliding_window=7, mask_token_id=5, rope=rope
        )
    ).eval()
    for name, parameter in theirs.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
        name = name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm")
        ours.get_parameter(name).copy_(parameter)
    features, rows = torch.randn(1, 9, 64), torch.randn(1, 5, 32)
    cache, positions = DynamicCache(), torch.arange(14)[None]
    ours.remember(ours.fuse(features), positions[:, :9], cache)
    block = torch.arange(9, 14)
    masks = ours.masks(torch.ones(1, 1, 14, dtype=torch.bool), (positions - block[:, None])[None])
    found = ours(rows, block[None], masks, cache)
    seen = {
        FULL: torch.ones(1, 1, 5, 14, dtype=torch.bool),
        SLIDING: ((positions[0] - block[:, None]).abs() <= 6)[None, None],
    }
    expected = theirs(rows, features, attention_mask=seen, position_ids=positions).last_hidden_state
    assert torch.allclose(found, expected, atol=ROUNDING)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_is_the_formula(variant):
    """All rows, after drafted tokens that are not the drafter's own best."""
    target = llama()
    head = random_block(target, **VARIANTS[variant])
    ids = text_of(target)
    runner, states = drafted(target, head, ids)
    block, reference = Block(runner, states, ids[:, -1:]), Reference(target, head)
    path: list[int] = []
    for place in range(head.config.drafts):
        token = torch.tensor([[path[-1] if path else int(ids[0, -1])]])
        with torch.no_grad():
            found = block.over_all(block.chain(place, token))[0]
        assert torch.allclose(found, reference.logits(ids[0].tolist(), path), atol=ROUNDING)
        path.append(7 + 3 * place)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_training_sees_what_drafting_sees(variant):
    """The mask over a whole text with several blocks, and teacher forcing, give the logits of drafting a single block."""
    target = llama()
    head = random_block(target, **VARIANTS[variant])
    ids, drafts = text_of(target, 20), head.config.drafts
    anchors = torch.tensor([[3, 14, 9]])
    states = draft_blocks(head, target, ids, features_of(target, head, ids), anchors)
    logits, _ = teacher_forced(head, target, states, after(ids, anchors, drafts))
    for place, anchor in enumerate(anchors[0].tolist()):
        runner, rows = drafted(target, head, ids[:, : anchor + 1])
        block = Block(runner, rows, ids[:, anchor : anchor + 1])
        for step in range(drafts):
            found = block.chain(step, ids[:, anchor + step : anchor + step + 1])
            assert torch.allclose(found[0], logits[0, place, step], atol=ROUNDING)


def test_nodes_of_a_tree_are_their_paths():
    """Also with a memory of the tokens before, which siblings do not share."""
    target = llama()
    for variant in ("dflash", "dspark, rnn", "dflash2"):
        head = random_block(target, **VARIANTS[variant])
        ids = text_of(target)
        runner, states = drafted(target, head, ids)
        with torch.no_grad():
            block, reference = Block(runner, states, ids[:, -1:]), Reference(target, head)
            first = block.read([[7, 8]], [[-1, -1]], [[1, 1]])
            second = block.read([[9, 7, 11]], [[1, 0, 1]], [[2, 2, 2]])
        found = [*first[0], *second[0]]
        for logits, path in zip(found, [[7], [8], [8, 9], [7, 7], [8, 11]], strict=True):
            assert torch.allclose(logits, reference.logits(ids[0].tolist(), path), atol=ROUNDING)


@torch.no_grad()
def test_a_captured_pass_is_the_eager_one():
    """With more columns and slots than the block needs, which no row of it sees."""
    target = llama()
    head = random_block(target, **VARIANTS["dflash2"])
    ids = one_and_four(target)[1]["input_ids"]
    runner, states = drafted(target, head, ids)
    wide = torch.nn.functional.pad(head.block_ids(ids[:, -1:]), (0, 3), value=9)
    known = torch.full((4, 1), ids.shape[1] - 1)
    inputs = Inputs(wide, known, known, None, torch.ones(4, 40, dtype=torch.bool))
    assert torch.allclose(runner.static_forward(inputs)[:, :5], states, atol=ROUNDING)


@torch.no_grad()
def test_rows_that_committed_different_numbers():
    """Each row sees its own context and block, and nothing of what longer rows have left in the slots behind."""
    target = llama()
    head = random_block(target, **VARIANTS["sliding"])
    ids = one_and_four(target)[1]["input_ids"][2:]
    states = head.fuse(features_of(target, head, ids))
    runner = BlockRunner(head, target, SlotCache(2, 64), torch.zeros(2, 1, dtype=torch.int64))
    runner.read(ids[:, 1:9], states[:, :8], [8, 8])
    found = runner.read(ids[:, 9:12], states[:, 8:11], [3, 1])
    for row, length in enumerate((11, 9)):
        _, alone = drafted(target, head, ids[row : row + 1, : length + 1])
        assert torch.allclose(found[row], alone[0], atol=1e-5)


@pytest.mark.slow
def test_compiled_passes_write_the_same_text():
    target = llama()
    spec = DFlash(trained_block(target, **VARIANTS["dflash2"]), tree=False)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=4, fast="compile")
    inputs = one_and_four(target)[0]
    expected = said_by(target, **inputs, **CALL)
    for _ in range(2):
        with no_fallback():
            assert model.generate(**inputs, **CALL).tolist() == expected.tolist()
    assert model.report.accepted > 0
    assert model.report.warnings == ()
    assert model.drafter.graphs.replays > 0


def test_scaled_logits_and_embeddings():
    """As z-lab's drafter for Muse Glimmer has them."""
    target = llama()
    plain = random_block(target)
    scaled = random_block(target, logit_scale=0.5, logit_cap=3.0, embedding_scale=2.0)
    states, ids = torch.randn(2, 32), torch.tensor([[3, 4]])
    with torch.no_grad():
        expected = 3 * torch.tanh(0.5 * plain.logits(states, target) / 3)
        assert torch.allclose(scaled.logits(states, target), expected)
        assert torch.allclose(scaled.embed(ids, target), 2 * plain.embed(ids, target))


def test_default_taps_are_those_of_z_lab():
    assert block_taps(36, 5) == (2, 10, 18, 26, 34)
    assert block_taps(16, 2) == (2, 14)
    assert block_taps(16, 1) == (9,)
    assert block_taps(2, 5) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"taps": ()}, "taps: name"),
        ({"block_size": 1}, "block_size: a block of 1 drafts nothing"),
        ({"layer_types": (FULL,)}, "layer_types"),
        ({"layer_types": (FULL, "chunked")}, "layer_types"),
        (WINDOW | {"sliding_window": 3}, "sliding_window: 3 is less than the block"),
        ({"markov": "other", "markov_rank": 3}, "markov: 'other'"),
        ({"markov": "vanilla"}, "markov, markov_rank"),
        ({"markov": "rnn", "markov_rank": 3}, "markov: 'rnn' is defined"),
        ({"confidence": True, "confidence_markov": True}, "confidence_markov"),
        ({"markov": "vanilla", "markov_rank": 3, "selector_rank": 3}, "markov, selector_rank"),
        ({"draft_vocab_size": 40}, "own_output"),
        ({"draft_vocab_size": 40, "own_output": True, "selector_rank": 3}, "selector_rank"),
        ({"conv_size": 2, "conv_group_size": 5}, "conv_group_size"),
    ],
)
def test_configs_are_checked(fields, said):
    with pytest.raises(ValueError, match=said):
        BlockConfig.for_target(llama(), **({"block_size": 5} | fields))


# ---- drafting


@pytest.mark.parametrize(
    ("variant", "batch"),
    in_turns(["dflash", "dspark, rnn", "sliding", "next token", "dspark", "dflash2", "reduced dspark"], [1, 0]),
)
def test_chains_are_the_formulas(variant, batch):
    target = llama()
    head, inputs = trained_block(target, **VARIANTS[variant]), one_and_four(target)[batch]
    ends = {"eos_token_id": ENDS if batch else None}
    ours = require_chains(Reference(target, head), assisted(target, head, tree=False), inputs, **ends)
    assert ours.tolist() == said_by(target, **inputs, **(CALL | ends)).tolist()


@pytest.mark.parametrize(("variant", "batch"), in_turns(["dflash", "dspark", "dflash2"], [1, 0]))
def test_trees_are_the_best_paths(variant, batch, monkeypatch):
    """Children are scored after their parent. Of all paths, none that was left out is better than one that was drafted."""
    target = llama()
    head = trained_block(target, **VARIANTS[variant])
    reference, inputs = Reference(target, head), one_and_four(target)[batch]

    def look(text: Any, draft: Draft, budget: int) -> None:
        for row, committed in rows_of(text, inputs["attention_mask"]):
            paths = {tuple(draft.prefix(row, node)) for node in range(int(draft.lengths[row]))}
            offered: dict[tuple[int, ...], float] = {}
            for path in sorted({(), *paths}, key=len):  # parents come first
                if len(path) == min(budget, head.config.drafts):
                    continue
                found, tokens = reference.logits(committed, list(path)).log_softmax(-1).topk(4)
                for more, token in zip(found.tolist(), tokens.tolist(), strict=True):
                    offered[(*path, token)] = offered.get(path, 0.0) + more
            best = sorted(offered.values(), reverse=True)[: len(paths)]
            assert sorted((offered[path] for path in paths), reverse=True) == pytest.approx(best, abs=ROUNDING)

    monkeypatch.setattr(Rates, "learn", lambda *args: None)  # the drafter is taken at its word
    model = assisted(target, head, tree=True, nodes=9)
    with watched(monkeypatch, look) as counted, no_fallback():
        model.generate(**inputs, **(CALL | {"eos_token_id": ENDS if batch else None, "max_new_tokens": 12}))
    assert counted[0] > 1
    assert model.report.accepted > 3


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("next_token", "most"), [(False, 3), (True, 4)])
def test_nothing_is_drafted_past_the_block(next_token, most, tree):
    """And a smaller budget takes its first tokens."""
    target = llama()
    head = trained_block(target, block_size=4, next_token=next_token)
    for length in (1, 2, 20):
        model = assisted(target, head, tree, draft_length=length)
        model.generate(**one_and_four(target)[0], **CALL)
        assert len(model.report.acceptance_by_position) == min(length, most)
        assert model.report.accepted > 0


def test_kept_rows_are_those_of_a_fresh_prefill():
    """After every round the slots hold the context of committed tokens, and no row of a block."""
    target = llama()
    head = trained_block(target, steps=24)  # often wrong at later positions
    fresh = lambda ids: drafted(target, head, ids)[0].cache.stores  # noqa: E731
    found = slots_apart(assisted(target, head, False), one_and_four(target)[0], fresh, BlockDrafting)
    assert len(found) > 4
    assert max(found) < 1e-5


SAMPLED_WITH: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "cut": {"temperature": 1.5, "top_k": 4},
}


@pytest.mark.parametrize(
    "variant,setting",
    # drafts that are drawn differently meet processors that judge them differently
    in_turns(["dflash", "dspark, rnn", "trees", "dspark", "dflash2", "confident"], list(SAMPLED_WITH)),
)
def test_sampling_follows_the_targets_distribution(variant, setting):
    """With untrained weights, and processors that depend on the drafted prefix."""
    target = tiny(0, layers=2)
    fields = VARIANTS["dspark" if variant in ("confident", "trees") else variant]
    fields = fields | {"block_size": 3, "conv_group_size": 1}
    if "selector_top_k" in fields:
        fields["selector_top_k"] = 3
    options, head = {"min_confidence": 0.5} if variant == "confident" else {}, random_block(target, **fields)
    if options:  # whether it is sure depends on the token before alone
        with torch.no_grad():
            head.confidence_head["proj"].weight[:, :16] = 0
    model = assisted(target, head, True if variant == "trees" else None, draft_length=2, **options)
    require_distribution(model, 21, new_tokens=4, **SAMPLED_WITH[setting])
    assert len(model.report.acceptance_by_position) == 2


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_a_draft_ends_where_it_is_not_sure(tree):
    target = llama()
    head = trained_block(target, **VARIANTS["dspark"])
    inputs = one_and_four(target)[1]
    expected = said_by(target, **inputs, **CALL).tolist()
    drafts = []
    for least in (0.0, 0.5, 1.0):
        model = assisted(target, head, tree, min_confidence=least)
        with no_fallback():
            assert model.generate(**inputs, **CALL).tolist() == expected
        drafts.append(model.report.drafted)
    assert drafts[0] > drafts[1] > drafts[2] == 0


def with_config(head: BlockHead, **fields: Any) -> BlockHead:
    """The same weights, read as another layout."""
    other = BlockHead(dataclasses.replace(head.config, **fields))
    other.load_state_dict(head.state_dict())
    return other.eval()


# ---- what a pair and a plan say


def test_a_drafter_that_is_never_right_is_reported(monkeypatch):
    monkeypatch.setattr(eagle, "ENOUGH", 10)
    target = llama()
    right = trained_block(target)
    wrong = with_config(right, next_token=True)
    for head, warned in ((right, 0), (wrong, 1)):
        model = assisted(target, head, tree=False)
        model.generate(**one_and_four(target)[0], **(CALL | {"max_new_tokens": 30}))
        assert ["sample_from_anchor" in said for said in model.report.warnings] == [True] * warned


def test_strings_and_options():
    assert parse("dflash:org/name") == DFlash("org/name")
    assert METHODS["dflash"] is DFlash
    with pytest.raises(ValueError, match="draft: 'dflash' does not name a checkpoint"):
        parse("dflash")
    with pytest.raises(ValueError, match="top_k"):
        DFlash("x", top_k=0)
    with pytest.raises(ValueError, match="min_confidence: 2"):
        DFlash("x", min_confidence=2)
    target = llama()
    with pytest.raises(ValueError, match="min_confidence: this block drafter has no confidence head"):
        assisted(target, random_block(target), min_confidence=0.5)


def test_memory(tmp_path):
    target = llama()
    model = assisted(target, random_block(target))
    model.save_pretrained(tmp_path)
    room = Room(target, torch.float32, 10, (64, 64), lambda quantization: {}, lambda window: 10)
    found = DFlash(str(tmp_path / "draft")).memory(room)
    assert found["Block drafters"] == 4 * sum(p.numel() for p in model.drafter.head.parameters())
    assert found["keys and values"] == 10 * 4 * 2 * 2 * 2 * 8  # tokens, bytes, K and V, layers, heads, size of a head
    assert DFlash(random_block(target)).memory(room) == {}


def test_targets_that_do_not_fit():
    target, other = llama(), build(BY_NAME["llama"], vocab_size=80)
    with pytest.raises(
        ValueError, match=r"draft: this block drafter cannot be used with LlamaForCausalLM.*vocabulary of 96"
    ):
        assisted(other, random_block(target))
    wide = random_block(target, target_hidden_size=48)
    with pytest.raises(ValueError, match="expected a width of 48"):
        assisted(target, wide)
