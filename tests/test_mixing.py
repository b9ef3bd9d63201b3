"""Targets whose result for a token depends on what else is in the forward pass are found by a trial, and decoded plainly."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, RECURRENT, build, random_ids
from covering import in_turns
from encoder_decoders import BY_NAME as ENCODER_DECODERS
from fuzz.weights import RoundedBeyondTwoDimensions, RoundedByPass, RoundedByToken
from pairs import CALL
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from assisted import AssistedModelForCausalLM, zoo
from assisted.engine.trust import trust
from assisted.engine.verifiable import mixes_tokens, require_verifiable

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + RECURRENT}


def _to_eighths(inputs: torch.Tensor, most: Any) -> torch.Tensor:
    scale = most.clamp(min=1e-6) / 127
    return (inputs / scale).round().clamp(-127, 127) * scale


class ByColumnOfRows(nn.Linear):
    """One scale for the same position of all rows."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(_to_eighths(inputs, inputs.abs().amax((0, -1), keepdim=True)))


class ByRow(nn.Linear):
    """One scale for all positions of a row."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(_to_eighths(inputs, inputs.abs().amax((-2, -1), keepdim=True)))


class ColumnsWithOutliers(nn.Linear):
    """Columns in which some token has an outlier are not rounded, as bitsandbytes' are not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept = (inputs.abs() > 6).flatten(0, -2).any(0)
        rounded = inputs.masked_fill(kept, 0)
        rounded = _to_eighths(rounded, rounded.abs().amax(-1, keepdim=True))
        return super().forward(torch.where(kept, inputs, rounded))


class Crowded(nn.Linear):
    """A router with a capacity: of the tokens with one sign, only the loudest few are let through."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loud = inputs.norm(dim=-1)
        let = loud >= loud.flatten().topk(min(3, loud.numel())).values[-1]
        return super().forward(inputs) * let[..., None]


class Observing(nn.Linear):
    """A scale that follows what was seen; a trial must not be."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(torch.maximum(self.seen, inputs.abs().amax()))  # type: ignore[operator, arg-type]
        return super().forward(_to_eighths(inputs, self.seen))


class ByGroup(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        groups = inputs.unflatten(-1, (-1, 8))
        return super().forward(_to_eighths(groups, groups.abs().amax(-1, keepdim=True)).flatten(-2))


class Static(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(_to_eighths(inputs, torch.tensor(4.0)))


class Dequantizing(nn.Linear):
    """Weights of 4 bits that are expanded at every call, as GPTQ's and AWQ's are."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scale = self.weight.abs().amax(1, keepdim=True) / 7
        return F.linear(inputs, (self.weight / scale).round() * scale, self.bias)


class ByTokenOnly(nn.Linear):
    """Outliers of the token itself are not rounded."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept = inputs.abs() > 6
        rounded = inputs.masked_fill(kept, 0)
        return super().forward(torch.where(kept, inputs, _to_eighths(rounded, rounded.abs().amax(-1, keepdim=True))))


MIXES = [RoundedByPass, ByColumnOfRows, ByRow, ColumnsWithOutliers, Crowded, Observing]
MIXES_IN = [(kind, "llama") for kind in MIXES] + [
    *((RoundedBeyondTwoDimensions, name) for name in ("opt", "qwen2_moe", "qwen3_next")),
    *((RoundedByPass, name) for name in ("mixtral", "gpt2", "gemma4", "jamba", "bloom")),
]
KEEPS = [RoundedByToken, RoundedBeyondTwoDimensions, ByGroup, Static, Dequantizing, ByTokenOnly, nn.Linear]
KEEPS_IN = [(kind, name) for kind in KEEPS for name in ("llama", "mixtral")] + [
    (RoundedByToken, name) for name in ("opt", "qwen2_moe", "deepseek_v3", "gpt_oss", "gemma4", "qwen3_5", "lfm2")
]


def quantized(name: str, kind: type, dtype: torch.dtype = torch.float32) -> Any:
    """A target whose linear modules are of a kind."""
    model = build(BY_NAME[name]).to(dtype)
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            module.__class__ = kind
            if kind is Observing:
                module.register_buffer("seen", torch.tensor(0.1, dtype=dtype), persistent=False)
    return model


def said_of(model: Any, rows: int = 2) -> str | None:
    return mixes_tokens(model, trust(model), lambda said: None, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), MIXES_IN)
def test_what_mixes_tokens_is_found(kind: type, name: str, dtype: torch.dtype) -> None:
    if name == "gpt2" and kind is RoundedByPass:
        pytest.skip("its layers are of another class")
    model = quantized(name, kind, dtype)
    before = copy.deepcopy(model.state_dict()), [b.clone() for b in model.buffers()]
    assert "rounds a token by what else its forward pass computes" in str(said_of(model))
    assert all(map(torch.equal, model.state_dict().values(), before[0].values()))
    assert all(map(torch.equal, model.buffers(), before[1]))
    assert (said_of(model, rows=1) is None) == (kind is ByColumnOfRows)


@pytest.mark.parametrize("case,dtype", in_turns(KEEPS_IN, [torch.float32, torch.bfloat16]))
def test_what_treats_each_token_alone_may_draft(case: tuple[type, str], dtype: torch.dtype) -> None:
    kind, name = case
    model = quantized(name, kind, dtype)
    assert said_of(model) is None and said_of(model, rows=1) is None


class InEightBitsOfFloat(nn.Linear):
    """Inputs of three bits after the point and one scale that was chosen before, as in checkpoints of FP8."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward((inputs / 0.006).clamp(-448, 448).to(torch.float8_e4m3fn).to(inputs.dtype) * 0.006)


@pytest.mark.parametrize("kind,layers", [(RoundedByToken, 3), (RoundedByToken, 8), (InEightBitsOfFloat, 8)])
def test_rounded_inputs_are_no_reason_to_refuse(kind: type, layers: int) -> None:
    """Where another order of sums rounds a number of an input to its other neighbour, logits move by up to 0.05 of their
    deviation."""
    for seed in range(6):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers}
        spread = 0.15 if kind is InEightBitsOfFloat else 0.4
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, initializer_range=spread, **sizes))
        for module in model.model.modules():
            if type(module) is nn.Linear:
                module.__class__ = kind
        require_verifiable(model.eval())


def test_its_text_is_the_targets_own() -> None:
    """In bfloat16, where no comparison of widths would tell it from rounding."""
    model = quantized("llama", RoundedByPass, torch.bfloat16)
    pair = AssistedModelForCausalLM.from_models(model, draft="recycle", draft_length=4)
    ids = random_ids(model, 2, 12)
    with pytest.warns(UserWarning, match="without drafts: RoundedByPass rounds a token"):
        found = pair.generate(ids, **CALL)
    assert found.equal(model.generate(ids, **CALL))
    assert pair.report.drafted == 0 and "rounds a token" in str(pair.report.because)


def test_rows_that_share_scales_draft_alone(package: Any) -> None:
    """Quark's scheme PTPC FP8 names the tokens' dimension, so a scale is that of a position of all rows."""
    kind = package(
        "quark",
        "import torch\n\n\nclass QParamsLinear(torch.nn.Linear):\n    def forward(self, x):\n"
        "        scale = x.abs().amax((0, -1), keepdim=True) / 127\n"
        "        return super().forward((x / scale).round() * scale)\n",
    ).QParamsLinear
    model = quantized("llama", kind)
    pair = AssistedModelForCausalLM.from_models(model, draft="recycle", draft_length=4)
    ids = random_ids(model, 2, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pair.generate(ids[:1], **CALL).equal(model.generate(ids[:1], **CALL))
    assert pair.report.drafted > 0
    for more in ({"inputs": ids}, {"inputs": ids[:1], "num_return_sequences": 2, "do_sample": True}):
        with pytest.warns(UserWarning, match="without drafts: QParamsLinear rounds a token"):
            pair.generate(**CALL | more)
        assert pair.report.drafted == 0
    with pytest.raises(ValueError, match="rounds a token"):
        list(pair.generate_many([*ids], max_new_tokens=4))


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders_are_tried_as_well(name: str) -> None:
    found = []
    for kind in (RoundedByPass, RoundedByToken):
        model = ENCODER_DECODERS[name].build()
        for module in model.get_decoder().modules():
            if type(module) is nn.Linear:
                module.__class__ = kind
        found.append(said_of(model))
    assert "RoundedByPass" in str(found[0]) and found[1] is None


@pytest.mark.quant
def test_a_threshold_drafts_with_one_warning() -> None:
    """bitsandbytes chooses the columns with outliers once a forward pass."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    said = {}
    for threshold in (6.0, 0.0):
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
        target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), quantization_config=config)
        pair = AssistedModelForCausalLM.from_models(target, draft="recycle", draft_length=4)
        ids = torch.arange(5, 25)[None]
        if threshold:
            with pytest.warns(UserWarning, match="moves logits by 0.*llm_int8_threshold=6"):
                pair.generate(ids, **CALL)
        pair.generate(ids, **CALL)  # without a further warning
        assert pair.report.drafted > 0
        said[threshold] = [text for text in pair.report.warnings if "rounds a token" in text]
    assert len(said[6.0]) == 1 and not said[0.0]
