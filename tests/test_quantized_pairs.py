"""Every quantization that has a name, as target and as draft: the text is the target's own, tokens are drafted and accepted.

A draft that fails costs speed only, and is not seen in the text: that is why the counts are looked at.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, random_ids
from covering import in_turns, one_in
from pairs import BY_NAME, no_fallback
from test_precision import MARGINS, margins
from test_quantization import MODULES, llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

from assisted import AssistedModelForCausalLM, zoo
from assisted.loading.quantization import NAMES, load_quantized, resolve

DTYPES = [torch.float32, torch.bfloat16]
# round activations: see `compare`
STEPS = {"int8", "int4", "int4-int8", "int8-bitsandbytes", "int8 of torchao, activations too"}
if torch.cpu._is_avx512_bf16_supported():  # bitsandbytes has a kernel of its own for such processors
    STEPS |= {"nf4", "fp4", "nf4, scales quantized"}
CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROMPTS = [torch.arange(5, 12)[None], (torch.arange(13)[None] * 17 + 3) % 90, torch.tensor([[9]])]


def int8_with_activations() -> TorchAoConfig:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig())


OTHERS = {  # configs that go by no name of ours
    "float8 of quanto": ("optimum.quanto", lambda: QuantoConfig(weights="float8")),
    "nf4, scales quantized": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
    "int8 of torchao, activations too": ("torchao", int8_with_activations),
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return needed(request.param, MODULES[request.param])


def needed(name: str, module: str) -> str:
    """`name`, where its backend is installed. It is not imported: the package has to work before anyone else does so."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"not installed: {module}")
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have shapes that every backend takes."""
    path = tmp_path_factory.mktemp("model")
    llama(path, hidden=128, inner=256, layers=2)
    return path


def compare(
    pair: AssistedModelForCausalLM,
    prompts: list[torch.Tensor],
    name: str | None = None,
    mask: torch.Tensor | None = None,
    drafts: bool = True,
) -> None:
    """The pair writes what its target writes alone, from tokens that were drafted and accepted.

    Where activations are rounded to bfloat16 or to 8 bits, a difference in the last bit of a float32 becomes one of 1/256 or
    1/127: near-ties may fall the other way, as in half precision. name: of the target's quantization. drafts: whether some
    must be accepted.
    """
    pair.reset_totals()
    for ids in prompts:
        seen = torch.ones_like(ids) if mask is None else mask
        call = CALL | {"attention_mask": seen}
        plain = pair.target.generate(ids, **call)
        with no_fallback():
            text = pair.generate(ids, draft_length=4, **call)
        if pair.dtype == torch.float32 and name not in STEPS:
            assert torch.equal(text, plain)
            continue
        for row, padding in zip(text, (1 - seen).sum(1).tolist(), strict=True):
            with torch.no_grad():
                found = margins(pair.target, row[None, padding:], ids.shape[1] - padding)
            assert found.max() <= MARGINS.get(pair.dtype, MARGINS[torch.bfloat16])
    assert pair.totals.drafted > 0
    assert pair.totals.accepted > 0 or not drafts


def loaded(path: str | Path, quantization: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A quantized target. Not through AutoModelForCausalLM, for one reason: quanto would start a C++ compiler."""
    return load_quantized(str(path), quantization, dtype=dtype)


some_names = pytest.mark.parametrize("name", one_in(3, NAMES), indirect=True)


@pytest.mark.parametrize("name,dtype", in_turns(NAMES, DTYPES), indirect=["name"])
def test_as_target(name: str, dtype: torch.dtype, folder: Path) -> None:
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    compare(AssistedModelForCausalLM.from_models(loaded(folder, name, dtype), draft=draft), PROMPTS, name)


@pytest.mark.parametrize("name,draft", in_turns(NAMES, ["early-exit", "layer-skip", "suffix"]), indirect=["name"])
def test_as_target_of_drafts_without_a_model(name: str, draft: str, folder: Path) -> None:
    pair = AssistedModelForCausalLM.from_models(loaded(folder, name, torch.float32), draft=draft)
    compare(pair, [PROMPTS[0].repeat(1, 3)], name, drafts=False)


@pytest.mark.parametrize("name,dtype", in_turns(NAMES, DTYPES), indirect=["name"])
def test_as_copy_of_the_target(name: str, dtype: torch.dtype, folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    compare(AssistedModelForCausalLM.from_models(target, draft=f"self:{name}"), PROMPTS)


@pytest.mark.parametrize("name,dtype", in_turns(NAMES, DTYPES[::-1]), indirect=["name"])
def test_as_draft_model(name: str, dtype: torch.dtype, folder: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(folder, dtype=dtype, draft=folder, draft_quantization=name)
    compare(pair, PROMPTS)


@some_names
def test_both_quantized_by_one_call(name: str, folder: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(
        folder, quantization_config=resolve(name, torch.float32), draft=folder, draft_quantization=name
    )
    compare(pair, PROMPTS, name)


@pytest.mark.parametrize("other,dtype", in_turns(list(OTHERS), DTYPES))
def test_configs_without_a_name(other: str, dtype: torch.dtype, folder: Path) -> None:
    module, make = OTHERS[other]
    needed(other, module)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    compare(AssistedModelForCausalLM.from_models(loaded(folder, make(), dtype), draft=plain), PROMPTS, other)
    pair = AssistedModelForCausalLM.from_pretrained(folder, dtype=dtype, draft=folder, draft_quantization=make())
    compare(pair, PROMPTS)


@some_names
def test_batches(name: str, folder: Path) -> None:
    target = loaded(folder, name, torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = (torch.arange(24).view(3, 8) * 13 + 4) % 90
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    compare(AssistedModelForCausalLM.from_models(target, draft=draft), [ids], name, mask)
    compare(AssistedModelForCausalLM.from_models(draft, draft=f"self:{name}"), [ids], mask=mask)


@some_names
def test_sampling_without_fused_layers(name: str, folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pair = AssistedModelForCausalLM.from_models(target, draft=f"self:{name}", fast="eager")
    with no_fallback():
        pair.generate(PROMPTS[0], **CALL | {"do_sample": True})
    assert pair.report.accepted > 0


@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated", "ignore:.*quantize_dynamic", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("how", ["torch", "torchao"])
def test_scales_of_a_whole_pass_are_decoded_plainly(how: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.float32)
    if how == "torch":
        target = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)
    else:
        needed("torchao", "torchao")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerTensor, quantize_

        quantize_(target, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))
    model = AssistedModelForCausalLM.from_models(target, draft="recycle", draft_length=4)
    for ids in PROMPTS[:2]:
        with pytest.warns(UserWarning, match=r"without drafts.*rounds a token by what else"):
            assisted = model.generate(ids, **CALL)
        assert assisted.tolist() == target.generate(ids, **CALL).tolist()
        assert model.report is not None and model.report.drafted == 0


@pytest.mark.quant
def test_a_model_that_does_not_run_when_quantized_is_refused(tmp_path: Path) -> None:
    """Falcon multiplies with `weight.T`, which torchao's weights don't know: such a draft would fail in its first step."""
    needed("int8-torchao", "torchao")
    target = build(BY_NAME["falcon-alibi"])
    with pytest.raises(ValueError, match="draft_quantization: FalconForCausalLM does not run in int8-torchao"):
        AssistedModelForCausalLM.from_models(target, draft="self:int8-torchao")
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="draft_quantization: FalconForCausalLM does not run in int8-torchao"):
        AssistedModelForCausalLM.from_models(target, draft=str(tmp_path), draft_quantization="int8-torchao")


@pytest.mark.quant
@pytest.mark.parametrize("bits,model_type", [("W4A16", "llama"), ("W4A16", "qwen3"), ("W8A16", "llama")])
def test_a_target_of_auto_round(bits: str, model_type: str, tmp_path: Path) -> None:
    """What auto-round itself writes: it loads, drafts, and its text is plain `generate`'s, but for near-ties of float16."""
    auto_round = pytest.importorskip("auto_round")
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    original = build(
        BY_NAME[model_type], hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=tokenizer.vocab_size
    )
    original.save_pretrained(tmp_path / "original")
    made = auto_round.AutoRound(
        original, tokenizer, scheme=bits, group_size=32, iters=0, disable_opt_rtn=True, device_map="cpu"
    )
    made.quantize_and_save(str(tmp_path), format="auto_round")
    (weights,) = {file.parent for file in tmp_path.rglob("quantization_config.json")}
    prompts = [random_ids(original, rows, 6, seed=rows).repeat(1, 3) for rows in (1, 2)]
    for draft in (["suffix", str(tmp_path / "original")], str(tmp_path / "original"), "early-exit:1"):
        pair = AssistedModelForCausalLM.from_pretrained(str(weights), draft=draft)
        assert pair.dtype == torch.float16  # as auto-round has it on a processor
        compare(pair, prompts, drafts=False)
        assert (pair.report.because, pair.report.warnings) == (None, ())
