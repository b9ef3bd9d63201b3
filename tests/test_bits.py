"""`exact="bits"`: no draft changes a bit of tokens and logits, greedy or drawn, in any row of a batch."""

from __future__ import annotations

import functools
import hashlib
import sys
from typing import Any

import pytest
import torch
from covering import in_turns
from test_native import LLAMA
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from assisted import AssistedModelForCausalLM, zoo
from assisted.distribution import Draws
from assisted.fast import fixed_width, native
from assisted.fast.fixed_width import FixedColumns
from assisted.fast.low_bit import LowBitLinear
from assisted.loading.packed import PackedConfig
from assisted.loading.quantization import quantize_copy

needed = pytest.mark.skipif(not native.is_available(), reason=native.loaded()[1])
TEXTS = [
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total\n\n\ndef",
    "import os\n\n\nclass Reader:\n",
]
DRAFTS: dict[str, Any] = {
    name: name
    for name in (
        *("suffix", "ngram", "recycle", "zoo:draft", "zoo:eagle3", "zoo:medusa", "self:int8", "self:int4"),
        *("early-exit:6", "layer-skip", "zoo:draft-other-tokenizer"),
    )
} | {"a tree of two": ["suffix", "zoo:draft"]}


BITS = [32, 16, 8, 8.8, 4, 4.8]


@pytest.fixture(scope="module", params=BITS)
def target(request: pytest.FixtureRequest) -> Any:
    dtype = torch.float32 if request.param == 32 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=dtype)
    if request.param >= 16:
        return model
    return quantize_copy(model, PackedConfig(int(request.param), input_bits=16 if request.param in (8, 4) else 8))


@pytest.fixture(scope="module")
def prompts() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"), padding_side="left")
    return tokenizer(TEXTS, return_tensors="pt", padding=True)


def sha(pair: Any, prompts: Any, **options: Any) -> tuple[str, str]:
    torch.manual_seed(3)
    call = {"max_new_tokens": 40, "return_dict_in_generate": True, "output_logits": True, "do_sample": False} | options
    made = pair.generate(**prompts, **call)
    logits = torch.stack(made.logits).float()
    return tuple(hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for t in (made.sequences, logits))


_UNDRAFTED: dict[Any, tuple[str, str]] = {}


def undrafted(pair: Any, prompts: Any, **options: Any) -> tuple[str, str]:
    """What any pair of a target writes without drafts; written once."""
    key = (pair.target, *options)
    if key not in _UNDRAFTED:
        _UNDRAFTED[key] = sha(pair, prompts, assisted=False, **options)
        assert pair.report.drafted == 0
    return _UNDRAFTED[key]


@needed
@pytest.mark.parametrize("draft,target", in_turns(list(DRAFTS), BITS), indirect=["target"])
def test_every_draft_and_length_and_plain_decoding(target: Any, draft: str, prompts: Any) -> None:
    if draft.startswith("self:") and isinstance(target.lm_head, LowBitLinear):
        pytest.skip("copies are made of targets that are not quantized")
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    pair = AssistedModelForCausalLM.from_models(target, draft=DRAFTS[draft], tokenizer=tokenizer, exact="bits")
    drawn = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
    lengths = [1, 4, "adaptive"]
    turn = list(DRAFTS).index(draft) % 3
    for options, some in (({}, lengths), (drawn, lengths[turn : turn + 1])):
        plain = undrafted(pair, prompts, **options)
        for length in some:
            assert sha(pair, prompts, draft_length=length, **options) == plain
            assert pair.report.drafted > 0 or length == "adaptive"


@needed
@pytest.mark.parametrize("bits,vocabulary", in_turns([16, 8, 8.8, 4, 4.8], [97, 127, 96]))
def test_heads_of_any_size(bits: float, vocabulary: int) -> None:
    """One that the kernels fill up is a module of its own; rows times tokens are more than its inputs."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA.to_diff_dict() | {"vocab_size": vocabulary, "hidden_size": 32})).eval()
    model = model.to(torch.bfloat16)
    if bits < 16:
        model = quantize_copy(model, PackedConfig(int(bits), input_bits=16 if bits in (8, 4) else 8))
    pair = AssistedModelForCausalLM.from_models(model, draft="recycle", exact="bits")
    rows = {"input_ids": torch.randint(5, 90, (6, 20), generator=torch.Generator().manual_seed(1))}
    options = {"max_new_tokens": 20, "pad_token_id": 0}
    plain = sha(pair, rows, assisted=False, **options)
    for length in (1, 4, 7, 11):
        assert sha(pair, rows, draft_length=length, **options) == plain


@needed
def test_rows_of_a_batch_are_those_of_single_prompts(target: Any, prompts: Any) -> None:
    pair = AssistedModelForCausalLM.from_models(target, draft="suffix", exact="bits")
    call = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    both = pair.generate(**prompts, **call)
    for row in range(2):
        shown = prompts["attention_mask"][row].bool()
        one = pair.generate(prompts["input_ids"][row, shown][None], **call)
        new = one.sequences[0, int(shown.sum()) :]
        assert torch.equal(both.sequences[row, len(shown) :][: len(new)], new)
        for ours, alone in zip(both.logits, one.logits, strict=False):
            assert torch.equal(ours[row], alone[0])


@needed
@pytest.mark.parametrize("padding", [0, 30])
def test_long_prompts_of_a_batch_are_those_of_single_ones(target: Any, padding: int) -> None:
    """More columns than float32 usually reads in C; with padding, rows of equal length lie apart."""
    ids = torch.randint(5, 300, (3, 120), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    pair = AssistedModelForCausalLM.from_models(target, draft="suffix", exact="bits")
    call = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    both = pair.generate(ids, attention_mask=mask, **call)
    for row in range(3):
        one = pair.generate(ids[row, mask[row].bool()][None], **call)
        for ours, alone in zip(both.logits, one.logits, strict=True):
            assert torch.equal(ours[row], alone[0])


@needed
def test_a_seed_makes_the_same_texts_call_after_call(target: Any, prompts: Any) -> None:
    found = []
    for draft in ("zoo:draft", "suffix"):
        pair = AssistedModelForCausalLM.from_models(target, draft=draft, exact="bits")
        torch.manual_seed(0)
        found.append([pair.generate(**prompts, max_new_tokens=12, do_sample=True).tolist() for _ in range(3)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@needed
def test_a_session_goes_on_with_the_same_bits(target: Any, prompts: Any) -> None:
    ids = prompts["input_ids"][:1]
    texts = []
    for assisted in (True, False):
        pair = AssistedModelForCausalLM.from_models(target, draft="suffix", exact="bits", draft_length=4)
        session, text = pair.session(), ids
        for _ in range(3):
            call = {"max_new_tokens": 20, "do_sample": False, "assisted": assisted}
            text = pair.generate(text, past_key_values=session, **call)
            text = torch.cat([text, ids[:, :7]], 1)
        texts.append(text)
    assert torch.equal(*texts)


@needed
def test_ordinary_passes_do_have_other_bits(prompts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this guards against: a kernel whose sums depend on the number of columns."""
    model = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.bfloat16)
    run = native.NativeLayers.run

    def wrong(layers: Any, hidden: torch.Tensor, *args: Any, **found: Any) -> None:
        run(layers, hidden, *args, **found)
        if (logits := found.get("logits")) is not None and hidden.shape[0] * hidden.shape[1] > 1:
            logits *= 1 + 2**-7

    monkeypatch.setattr(native.NativeLayers, "run", wrong)
    pair = AssistedModelForCausalLM.from_models(model, draft="suffix", exact="bits")
    with pytest.raises(ValueError, match="differ from those of each"):
        pair.generate(**prompts, max_new_tokens=4)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where passes are of a fixed width."""
    if request.param == "cpu":
        monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "no C compiler was found"))
        monkeypatch.setattr(native, "is_available", lambda *dtype: False)
    return str(request.param)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def loaded(dtype: torch.dtype, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=dtype).to(device)


@pytest.mark.parametrize("draft", DRAFTS)
def test_fixed_widths_keep_the_bits(draft: str, device: str, prompts: Any) -> None:
    """What the tests above show of layers in C, where there are none: every draft in one of three dtypes."""
    turn = list(DRAFTS).index(draft)
    dtype, name, length = DTYPES[turn % 3], DRAFTS[draft], (3, "adaptive", 1)[turn // 3 % 3]
    if device == "cuda" and draft == "self:int4":
        name = "self:nf4"
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    pair = AssistedModelForCausalLM.from_models(loaded(dtype, device), draft=name, tokenizer=tokenizer, exact="bits")
    given = prompts.to(device)
    for options in ({}, {"do_sample": True, "temperature": 0.9, "top_p": 0.95}):
        plain = undrafted(pair, given, **options)
        for _ in range(1 if device == "cpu" else 2):  # a GPU has captured passes, and runs them in the second call
            assert sha(pair, given, draft_length=length, **options) == plain
        assert pair.report.drafted > 0 or length == "adaptive"
    assert pair.report.passes == ("fixed widths" if device == "cpu" else "CUDA graphs")
    if device == "cuda":
        assert pair.graphs.captured and pair.graphs.reason is None


def test_rows_have_the_bits_that_they_have_alone_in_fixed_widths(device: str, prompts: Any) -> None:
    """Also without padding, and with more columns than one part has."""
    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.bfloat16).to(device)
    pair = AssistedModelForCausalLM.from_models(target, draft="suffix", exact="bits", draft_length=7)
    call = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ids = torch.randint(5, 300, (3, 40), generator=torch.Generator().manual_seed(0)).to(device)
    padded = prompts.to(device)
    for batch, mask in ((ids, torch.ones_like(ids)), (padded["input_ids"], padded["attention_mask"])):
        both = pair.generate(batch, attention_mask=mask, **call)
        assert pair.report.drafted > 0
        for row, (shown, text) in enumerate(zip(mask.bool(), batch, strict=True)):
            one = pair.generate(text[shown][None], **call)
            for ours, alone in zip(both.logits, one.logits, strict=False):
                assert torch.equal(ours[row], alone[0])


def test_attention_that_depends_on_other_columns_is_found(monkeypatch: pytest.MonkeyPatch, prompts: Any) -> None:
    monkeypatch.setattr(native, "is_available", lambda *dtype: False)
    model = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.bfloat16)
    attend = FixedColumns.attend

    def wrong(self: FixedColumns, *args: Any) -> torch.Tensor:
        return attend(self, *args) * (1 + 2**-7 * (self.count > 1))

    monkeypatch.setattr(FixedColumns, "attend", wrong)
    pair = AssistedModelForCausalLM.from_models(model, draft="suffix", exact="bits")
    with pytest.raises(ValueError, match="differ from those of each"):
        pair.generate(**prompts, max_new_tokens=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "of_keys", "size", "longest"), [(8, 2, 32, 700), (4, 4, 80, 40), (6, 2, 64, 1300)])
def test_the_kernel_reads_its_list(dtype: torch.dtype, heads: int, of_keys: int, size: int, longest: int) -> None:
    from assisted.fast.attention_triton import attend

    torch.manual_seed(0)
    query = torch.randn(1, 16, heads, size, dtype=dtype, device="cuda").transpose(1, 2)[0]
    keys, values = (torch.randn(2, of_keys, longest + 50, size, dtype=dtype, device="cuda") for _ in range(2))
    rows = torch.tensor([0, 1, 0, 1, 1], device="cuda")
    counts = torch.tensor([longest, 1, longest - 3, longest // 2, 17], dtype=torch.int32, device="cuda")
    lists = torch.stack([torch.randperm(longest) for _ in range(5)]).int().cuda()
    made, alone = torch.zeros_like(query), torch.zeros_like(query)
    attend(made, query, keys, values, rows, lists, counts, size**-0.5)
    attend(alone, query[:, 2:], keys, values, rows[2:3], lists[2:3], counts[2:3], size**-0.5)
    assert torch.equal(alone[:, 0], made[:, 2])
    for column, count in enumerate(counts.tolist()):
        seen = lists[column, :count].long()
        states = (store[rows[column], :, seen][None].float() for store in (keys, values))
        asked = query[None, :, column : column + 1].float()
        right = torch.nn.functional.scaled_dot_product_attention(asked, *states, enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(
            made[:, column].float(), right, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=0
        )


def test_what_cannot_be_exact_to_the_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    other = GPT2LMHeadModel(GPT2Config(**small)).to(torch.bfloat16)
    ids = torch.arange(5)[None]
    with pytest.raises(ValueError, match=r"exact: .bits. is not possible here.*have no faster form"):
        AssistedModelForCausalLM.from_models(other, draft="suffix", exact="bits").generate(ids, max_new_tokens=4)
    with pytest.raises(ValueError, match="exact: 'digits' is not known"):
        AssistedModelForCausalLM.from_models(other, draft="suffix", exact="digits")
    with pytest.raises(ValueError, match="needs fast='auto', and fast is 'compile'"):
        AssistedModelForCausalLM.from_models(other, draft="suffix", exact="bits", fast="compile")
    monkeypatch.setattr(fixed_width, "why_not", lambda device: "Triton is not here")
    model = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.float16)
    with pytest.raises(ValueError, match="Triton is not here"):
        AssistedModelForCausalLM.from_models(model, draft="suffix", exact="bits").generate(ids, max_new_tokens=4)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "assisted.fast.attention_triton", None)
    assert "Triton computes its attention" in str(fixed_width.why_not(torch.device("cuda")))
    assert fixed_width.why_not(torch.device("cpu")) is None


def test_draws_follow_the_distribution_and_depend_on_the_position_alone() -> None:
    torch.manual_seed(1)
    p = torch.tensor([0.5, 0.2, 0.0, 0.3])
    draws = Draws(2)
    found = draws.sample(p.expand(2, 20_000, 4), [0, 0], torch.arange(1, 20_000).repeat(2, 1))
    for row in found:
        counts = torch.bincount(row, minlength=4)
        assert counts[2] == 0
        expected = 20_000 * p[[0, 1, 3]]
        assert ((counts[[0, 1, 3]] - expected).square() / expected).sum() < 13.8  # chi-square, 2 degrees, 1 of 1000
    assert not torch.equal(found[0], found[1])
    torch.manual_seed(1)
    again = Draws(2)
    assert torch.equal(again.sample(p.expand(2, 3, 4), [5, 5], torch.tensor([[1, 2]] * 2)), found[:, 5:8])


ODD = {  # sizes at which a product may be computed in another way for many columns
    "an odd vocabulary": ("llama", {}),
    "a tied head": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "other biases": ("qwen2", {}),
    "padded inputs": ("llama", {"intermediate_size": 88}),
    "narrow heads": ("llama", {"head_dim": 16}),
    "an odd width": ("qwen3", {"hidden_size": 48, "head_dim": 32}),
    "a window": ("mistral", {"sliding_window": 8}),
}


@pytest.mark.parametrize("size,width", in_turns(list(ODD), [(8, 16), (4, 8), (4, 16), (8, 8)]))
def test_packed_weights_of_odd_sizes_over_more_columns_than_inputs(size: str, width: tuple[int, int]) -> None:
    bits, input_bits = width
    kind, sizes = ODD[size]
    given = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1} | sizes
    config = AutoConfig.for_model(kind, vocab_size=97, num_hidden_layers=2, pad_token_id=0, eos_token_id=None, **given)
    torch.manual_seed(0)
    target = quantize_copy(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), PackedConfig(bits, input_bits=input_bits)
    )
    pair = AssistedModelForCausalLM.from_models(target, draft="recycle", exact="bits")
    inputs = {"input_ids": torch.randint(3, 97, (6, 9), generator=torch.Generator().manual_seed(0))}
    plain = sha(pair, inputs, assisted=False, max_new_tokens=10)
    for length in (1, 11):  # of six rows, 12 columns and 72
        assert sha(pair, inputs, draft_length=length, max_new_tokens=10) == plain
