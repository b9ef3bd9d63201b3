"""`assisted plan`: the bytes of weights, copies and states against real ones, what it chooses, and its errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, Architecture, build, half_right, random_ids
from covering import over
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from assisted import MTP, AssistedModelForCausalLM, DraftModel, zoo
from assisted.cli.main import main
from assisted.engine.cache import SlotCache
from assisted.engine.trust import trust
from assisted.engine.verifiable import expected_masks, masks_of
from assisted.engine.window import keep_last
from assisted.fast import native
from assisted.fast.fused import copy_bytes, fused
from assisted.fast.low_bit import LowBitLinear
from assisted.fast.products import Product, copied_in, packs
from assisted.lab.plan import CARDS, Plan, Shapes, Use, parts, plan
from assisted.lab.plan.devices import bytes_of
from assisted.lab.plan.sizes import read_per_pass
from assisted.lengths.cost_model import expected_tokens
from assisted.loading.quantization import NAMES, load_quantized, memory_bytes, quantize_copy, stored_bytes
from assisted.methods import parse
from assisted.methods.mtp.head import save_mtp
from assisted.methods.mtp.train import MTPSettings, MTPTraining

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(**{**WIDE, "vocab_size": 512, "num_hidden_layers": 2, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama(), dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_are_counted_as_they_are_loaded(folder: Path, name: str) -> None:
    pytest.importorskip({"n": "bitsandbytes", "f": "bitsandbytes"}.get(name[0], "torch"))
    if name.startswith("int") and "-" in name and name != "int4-int8":
        pytest.importorskip(
            {"bitsandbytes": "bitsandbytes", "quanto": "optimum.quanto", "torchao": "torchao"}[name.split("-")[1]]
        )
    shapes = Shapes.read(str(folder))
    loaded = load_quantized(str(folder), name, dtype=torch.bfloat16)
    real = memory_bytes(loaded, buffers=name in ("int8", "int4", "int4-int8"))
    counted = stored_bytes(shapes.model, name, torch.bfloat16)
    assert counted == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_is_counted_without_what_it_shares(tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(llama(tie_word_embeddings=tied), dtype=torch.float32).eval()
    copied = quantize_copy(model, "int8")
    both = memory_bytes(model, copied, buffers=True) - memory_bytes(model, buffers=True)
    assert stored_bytes(model, "int8", torch.float32, copy=True) == pytest.approx(both, rel=0.01)
    assert stored_bytes(model, None, torch.float32, copy=True) == 0
    assert stored_bytes(model, None, torch.float32) == memory_bytes(model, buffers=False)


def copied(module: nn.Module, original: nn.Module) -> int:
    """The bytes of a faster model's tensors that are not the original's."""
    own = {weight.untyped_storage().data_ptr() for weight in original.parameters()}
    found: dict[int, int] = {}

    def add(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.is_mkldnn:
            found[id(tensor)] = tensor.numel() * tensor.element_size()
        elif isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    for part in module.modules():
        products = [value for value in vars(part).values() if isinstance(value, Product)]
        for product in products:
            add(product.packed)
            add(product.weight)
            add(None if product.native is None else product.native.held[0])
    return sum(found.values())


@pytest.mark.skipif(not packs(torch.float32), reason="oneDNN is not here")
@pytest.mark.parametrize(
    "config", [llama(), GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=512)], ids=["llama", "gpt2"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needed", [True, False], ids=["copies", "in place where that is as fast"])
def test_copies_are_counted_as_they_are_made(
    config: Any, dtype: torch.dtype, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needed:
        monkeypatch.setattr(native, "suffices_in_place", lambda dtype: False)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    real = copied(fused(model).module, model)
    assert copy_bytes(model, dtype) == real
    assert real > 0 or not needed or dtype != torch.float32 or copied_in(dtype) is None
    assert real == 0 or not native.suffices_in_place(dtype)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert copy_bytes(shapes, dtype) == real
    if real:
        big = llama(hidden_size=8192, intermediate_size=32768, num_attention_heads=64)
        with torch.device("meta"):
            large = AutoModelForCausalLM.from_config(big, dtype=dtype)
        assert copy_bytes(large, dtype, memory=2**30) == 0 < copy_bytes(large, dtype, memory=2**40)


@over("architecture", ARCHITECTURES)
def test_states_are_those_of_the_models_own_cache(architecture: Architecture) -> None:
    model = build(architecture)
    ids = torch.tensor([[5, 6, 7]])
    cache = model(input_ids=ids, use_cache=True).past_key_values
    every = getattr(cache, "layers", [])
    layers = [layer for layer in every if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    dicts = [getattr(layer, name, None) or {} for layer in every for name in ("conv_states", "recurrent_states")]
    fixed = sum(state.nbytes for states in dicts for state in states.values() if state is not None)
    if not layers and not fixed:
        pytest.skip("neither keys and values nor states")
    assert Shapes.of_config(model.config).states.fixed == fixed
    real = [(layer.keys.numel() + layer.values.numel()) // layer.keys.shape[2] for layer in layers]
    assert sorted(Shapes.of_config(model.config).states.per_token) == sorted(real)


def planned_states(shapes: Shapes, rows: int, drafted: int, draft: str = "suffix") -> int:
    use = Use(64, rows, drafted, shapes.model.dtype, "cpu")
    return sum(part.bytes for part in parts(shapes, parse(draft), use) if part.name.endswith("recurrent states"))


@over("architecture", RECURRENT)
def test_states_are_planned_as_the_engine_keeps_them(architecture: Architecture) -> None:
    """A copy, a state for each column, or what layers with the delta rule keep of each column."""
    model, text = build(architecture), random_ids(build(architecture), 2, 9)
    try:
        pair = AssistedModelForCausalLM.from_models(model, draft=half_right(model, noise=0.1), draft_length=5)
    except ValueError:
        pytest.skip("refused as a target")
    assert expected_masks(build(architecture).to("meta")).trees == masks_of(model, trust(model)).trees
    pair.generate(text, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert pair.report is not None and pair.report.drafted
    assert planned_states(Shapes.of_config(model.config), 2, 5) == pytest.approx(pair.report.state_bytes, rel=0.1)


@pytest.mark.parametrize("drafted", [3, 16])
@pytest.mark.parametrize("draft", ["mtp", "self:int8"])
def test_states_of_the_shipped_hybrid(draft: str, drafted: int) -> None:
    """A copy of the target drafts from the target's states, which are then copied."""
    spec = MTP(tree=False) if draft == "mtp" else draft
    pair = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft=spec, draft_length=drafted)
    pair.generate(torch.arange(5, 25)[None], max_new_tokens=24, do_sample=False, eos_token_id=None)
    shapes = Shapes.read("zoo:hybrid")
    assert pair.report is not None
    assert planned_states(shapes, 1, drafted, draft) == pytest.approx(pair.report.state_bytes, rel=0.1)
    assert planned_states(shapes, 1, drafted, draft) != pytest.approx(2 * shapes.states.fixed, rel=0.1)


def test_published_figures() -> None:
    """Qwen3-8B: 8.19 billion parameters, and 144 KiB of keys and values a token in 16 bits."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    shapes = Shapes.of_config(config, "Qwen3-8B")
    assert shapes.numbers == pytest.approx(8.19e9, rel=0.002)
    assert sum(shapes.states.per_token) * 2 == 144 * 1024
    assert shapes._states_by_config() == shapes.states
    found = {part.name: part.bytes for part in parts(shapes, parse("suffix"), Use(dtype=torch.bfloat16))}
    assert found["target: weights"] == 2 * shapes.numbers
    small = {p.name: p.bytes for p in parts(shapes, parse("suffix"), Use(dtype=torch.bfloat16, quantization="nf4"))}
    assert small["target: weights"] == pytest.approx(6.4e9, rel=0.02)
    twelve = plan(shapes, memory="12GB", context=8192)
    assert twelve.best.quantization == "nf4" and twelve.best.fits and not twelve.candidates[0].fits
    assert plan(shapes, card_name="rtx 3090").best.quantization is None


def test_experts_that_are_not_chosen_are_not_read() -> None:
    config = MixtralConfig(**WIDE, vocab_size=512, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2)
    shapes = Shapes.of_config(config)
    dense = Shapes.of_config(llama(tie_word_embeddings=True))
    weights = 2 * shapes.numbers
    assert 0 < read_per_pass(shapes, weights) < weights / 2
    assert read_per_pass(dense, 2 * dense.numbers) == 2 * dense.numbers


def test_what_does_not_fit_is_offloaded(folder: Path) -> None:
    found = plan(str(folder), "self:nf4", memory="620MB", context=64)
    assert not any(one.fits for one in found.candidates) and found.chosen == 0
    assert found.best.offloaded > 0
    assert 'device_map="auto", max_memory=' in found.line
    assert "cross the bus" in str(found)
    fits = plan(str(folder), "self:nf4", memory="2GB", context=64)
    assert fits.best.fits and not fits.best.offloaded and fits.best.speed.plain[1] > found.best.speed.plain[1]
    assert {part.name for part in fits.best.parts} >= {"target: weights", "draft: quantized copy", "logits of a pass"}


def test_more_of_anything_takes_more(folder: Path) -> None:
    def total(**asked: Any) -> int:
        return plan(str(folder), asked.pop("draft", "suffix"), memory="8GB", **asked).candidates[0].bytes

    assert total(context=64) < total(context=1024) < total(context=1024, rows=4)
    assert total(quantization="nf4") < total(quantization="int8") < total()
    assert total() < total(draft="recycle") and total() < total(draft=str(folder))
    assert total(draft=str(folder), draft_quantization="nf4") < total(draft=str(folder))


@pytest.mark.parametrize(
    "draft", ["zoo:draft", "zoo:eagle3", "zoo:medusa", "self:int8", "early-exit", ["suffix", "zoo:draft"]]
)
def test_the_shipped_pair_takes_what_is_counted(draft: Any) -> None:
    """Weights alone; peaks are measured by `benchmarks/run.py plan`."""
    found = plan("zoo:target", draft, device="cpu", context=256).candidates[0]
    weights = sum(p.bytes for p in found.parts if "weights" in p.name or "head" in p.name or "copy" in p.name)
    weights -= sum(p.bytes for p in found.parts if "copies" in p.name)
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=draft)
    assert weights == pytest.approx(pair.get_memory_footprint(), rel=0.02)


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        ("FOLDER", "zoo:eagle3", "was made for a vocabulary of 4096; the target's has 512"),
        ("FOLDER", "zoo:medusa", "was made for hidden states of width 192; the target's have"),
        ("FOLDER", "zoo:smollm2-eagle3", "was made for a vocabulary of 49152; the target's has 512"),
        ("zoo:draft", "zoo:eagle3", r"reads the hidden states \(2, 8, 13\); those of the target are 1 .. 2"),
    ],
)
def test_heads_of_another_target_are_refused(folder: Path, target: str, draft: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"draft: .*{reason}"):
        plan(str(folder) if target == "FOLDER" else target, draft, device="cpu", context=64)


def pair_of(found: Plan) -> AssistedModelForCausalLM:
    """What the line of a plan loads."""
    names: dict[str, Any] = {}
    exec("\n".join([*found.imports, f"pair = {found.line}"]), names)
    return names["pair"]


def test_a_saved_pair_and_its_line(folder: Path, tmp_path: Path) -> None:
    AssistedModelForCausalLM.from_pretrained(folder, draft="suffix").save_pretrained(tmp_path)
    found = plan(str(tmp_path), device="cpu", context=128)
    assert found.download is None and found.best.fits  # nothing of a folder is downloaded
    assert pair_of(found).dtype == torch.bfloat16


@pytest.mark.parametrize("quantization", ["int8", "nf4", "int4", "int4-int8"])
def test_the_line_of_a_quantized_target_has_its_imports(folder: Path, quantization: str) -> None:
    for device in {"int8": ("cuda", "cpu"), "nf4": ("cuda",)}.get(quantization, ("cpu",)):
        found = plan(str(folder), memory="2GB", device=device, context=64, quantization=quantization)
        names: dict[str, Any] = {}
        exec("\n".join(found.imports), names)
        config = "PackedConfig" if device == "cpu" else "BitsAndBytesConfig"
        assert config in names and config in found.line
        in_4_bits = 'bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)'
        assert (in_4_bits in found.line) is (quantization == "nf4")


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-int8"])
def test_the_line_loads_what_the_name_means(folder: Path, quantization: str) -> None:
    """A target as a draft of this name is loaded, the bits of its inputs included."""
    found = plan(str(folder), device="cpu", context=64, quantization=quantization)
    draft, target = load_quantized(str(folder), quantization, dtype=torch.bfloat16), pair_of(found).target
    kinds = [[m.kind for m in model.modules() if isinstance(m, LowBitLinear)] for model in (target, draft)]
    assert kinds[0] == kinds[1] and kinds[0]


@pytest.mark.parametrize("has_kernels", [True, False])
def test_smaller_targets_on_a_cpu(folder: Path, has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda *dtype: has_kernels)
    found = plan(str(folder), device="cpu", context=64)
    assert [one.quantization for one in found.candidates] == [None, "int8", "int4"]
    sizes = {one.quantization: one.parts[0].bytes for one in found.candidates}
    assert sizes["int4"] < sizes["int8"] < sizes[None]


@pytest.mark.parametrize(
    "draft", [["suffix", "zoo:draft"], "suffix+zoo:draft", ["ngram", DraftModel("zoo:draft")], DraftModel("zoo:draft")]
)
def test_the_line_names_the_whole_draft(draft: Any) -> None:
    found = plan("zoo:target", draft, device="cpu", context=64)
    loaded = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=draft)
    members = [getattr(pair.drafter, "members", [pair.drafter]) for pair in (pair_of(found), loaded)]
    assert [type(member) for member in members[0]] == [type(member) for member in members[1]]
    assert found.best.draft == found.draft and found.draft in str(found)


def test_a_folder_with_a_plus_in_a_list(tmp_path: Path) -> None:
    where = tmp_path / "a+b" / "c+d"
    shutil.copytree(zoo.folder("draft"), where)
    found = plan("zoo:target", ["suffix", str(where)], device="cpu", context=64)
    assert found.draft == f"suffix+{where}"
    for draft in (found.draft, f"{where}+suffix", f"draft-tree:{where}+suffix", str(where)):
        assert [one.model for one in parse(draft).parts() if one.quantizes == "model"] == [str(where)]
    assert len(pair_of(found).drafter.members) == 2


@pytest.mark.parametrize(
    ("draft", "window"), [("zoo:draft", 16), ("zoo:eagle3", 64), ("mtp", 32), (["suffix", "zoo:draft"], 64)]
)
def test_a_window_is_counted_as_it_is_allocated(draft: Any, window: int, tmp_path: Path) -> None:
    if draft == "mtp":
        target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
        save_mtp(MTPTraining(target, MTPSettings()).student, tmp_path)
        draft = f"mtp:{tmp_path}"
    prompt, new = 500, 24
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=draft, draft_length=4, draft_window=window)
    caches: list[SlotCache] = []
    with pytest.MonkeyPatch.context() as watching:
        for module in ("methods.shared.model_drafter", "methods.shared.runner"):
            watching.setattr(
                f"assisted.{module}.keep_last", lambda cache, kept: (caches.append(cache), keep_last(cache, kept))
            )
        ids = torch.arange(prompt)[None] % 400 + 50
        pair.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)
    held = {id(cache): cache for cache in caches}
    assert len(held) == 1
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[-1].slot_layers)

    def counted(draft_window: int | None) -> int:
        found = plan("zoo:target", draft, device="cpu", context=prompt + new, drafted=4, draft_window=draft_window)
        return sum(part.bytes for part in found.candidates[0].parts if part.name == "draft: keys and values")

    assert counted(window) == real
    assert counted(None) > 2 * real
    assert counted(prompt) == counted(None)


def test_a_window_is_in_the_line(folder: Path) -> None:
    found = plan(str(folder), str(folder), memory="8GB", draft_window=256)
    assert f"draft={str(folder)!r}, draft_window=256, " in found.line
    assert "reads the whole prompt" in str(found) and found.to_dict()["draft_window"] == 256
    with pytest.raises(ValueError, match="draft_window: 8 is not possible, as Suffix keeps no keys and values"):
        plan(str(folder), memory="8GB", draft_window=8)
    recurrent = next(one for one in RECURRENT if one.name == "qwen3_5")
    shapes = Shapes.of_config(build(recurrent).config)
    with pytest.raises(ValueError, match="draft_window: 8 is not possible, as this draft has recurrent states"):
        plan(str(folder), shapes, memory="8GB", draft_window=8)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--vram", "12GB", "--context", "512"]) == 0
    text = capsys.readouterr().out
    assert "target: keys and values" in text and "from_pretrained(" in text and "assisted doctor" in text
    out = tmp_path / "plan.json"
    assert main(["plan", str(folder), "--card", "4070", "--batch", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["device"]["memory"] == 12 * 10**9 and found["batch"] == 2
    best = found["candidates"][found["chosen"]]
    assert best["bytes"] == sum(part["bytes"] for part in best["parts"])
    assert 0 < best["plain_tokens_per_second"][0] < best["plain_tokens_per_second"][1]


def test_a_folder_with_a_config_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found, whole = (plan(str(path), memory="8GB", context=64) for path in (tmp_path, folder))
    assert found.best.parts == whole.best.parts
    assert main(["plan", str(tmp_path), "--draft", str(tmp_path), "--card", "NVIDIA GeForce RTX 4070 Ti"]) == 0
    assert "counted from the config" in capsys.readouterr().out


def test_an_adapter_is_planned_as_its_base_model(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path)
    found = plan(str(tmp_path), memory="8GB", context=64)
    assert found.best.parts == plan(str(folder), memory="8GB", context=64).best.parts
    assert found.notes == (f"{tmp_path}: these are the sizes of its base model, {folder}, without the adapter.",)
    assert str(tmp_path) in found.line


def in_fp8(folder: Path, where: Path) -> Path:
    """The same model in FP8 with a scale for each square of 128."""
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            tensors[name] = weight.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones([size // 128 for size in weight.shape])
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    return quantized_config(folder, where, {"quant_method": "fp8", "weight_block_size": [128, 128]})


def quantized_config(folder: Path, where: Path, method: dict[str, Any]) -> Path:
    fields = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (where / "config.json").write_text(json.dumps(fields))
    return where


def test_weights_that_are_unpacked(folder: Path, tmp_path: Path) -> None:
    """transformers (5.23) unpacks FP8 where there are no products for it: the model is then an ordinary one, of which copies
    are made."""
    packed = str(in_fp8(folder, tmp_path))
    found = plan(packed, "self:int8", device="cpu", context=64)
    loaded = AutoModelForCausalLM.from_pretrained(packed, dtype="auto")
    assert found.candidates[0].parts == plan(str(folder), "self:int8", device="cpu", context=64).candidates[0].parts
    assert {part.name: part.bytes for part in found.best.parts}["target: weights"] == memory_bytes(
        loaded, buffers=False
    )
    assert any("(fp8) are unpacked" in note for note in found.notes)
    for name, fits in (("3090", False), ("A100 80GB", False), ("4090", True), ("H100", True)):
        sizes = [
            part.bytes for part in plan(packed, card_name=name, context=64).best.parts if part.name == "target: weights"
        ]
        assert (sizes == [Shapes.read(packed).stored]) is fits
    with pytest.raises(
        ValueError, match=r"draft: 'self:nf4' is a quantized copy of the target, .* quantized already \(fp8\)"
    ):
        plan(packed, "self:nf4", card_name="4090", context=64)
    quantized_config(folder, tmp_path, {"quant_method": "compressed-tensors"})  # unpacked in modules of its own
    for device in ("cpu", "cuda"):
        use = Use(device=device, dtype=torch.bfloat16)
        counted = parts(Shapes.read(packed), parse("suffix"), use)
        assert {part.name: part.bytes for part in counted}["target: weights"] == memory_bytes(loaded, buffers=False)
        assert "copies of weights for fast products" not in {part.name for part in counted}


def test_a_checkpoint_of_mlx_is_named(folder: Path, tmp_path: Path) -> None:
    """As mlx_lm.convert (0.32) writes it: its field has the name that transformers reads, and no method."""
    require_refused(folder, tmp_path, {"group_size": 64, "bits": 4, "mode": "affine"}, "is quantized for MLX, which")


def test_a_quantization_that_transformers_does_not_know(folder: Path, tmp_path: Path) -> None:
    """transformers (5.23) reads the weights of ModelOpt's FP8 without their scales."""
    require_refused(
        folder, tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}, "is quantized by 'modelopt', which"
    )


def require_refused(folder: Path, where: Path, method: dict[str, Any], said: str) -> None:
    packed = str(quantized_config(folder, where, method))
    shutil.copy(folder / "model.safetensors", where)
    for role, call in (
        ("target", lambda: plan(packed, memory="8GB")),
        ("draft", lambda: plan(str(folder), packed, memory="8GB")),
        ("target", lambda: AssistedModelForCausalLM.from_pretrained(packed)),
        ("draft", lambda: AssistedModelForCausalLM.from_pretrained(folder, draft=packed)),
        ("draft", lambda: AssistedModelForCausalLM.from_pretrained(folder, draft=packed, draft_quantization="int8")),
    ):
        with pytest.raises(ValueError, match=rf"^{role}: .* {said}"):
            call()


def test_a_quantized_config_alone(folder: Path, tmp_path: Path) -> None:
    quantized_config(folder, tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        ValueError, match=r"target: .* is quantized \(gptq\), and its config does not tell .* no \*.safetensors"
    ):
        plan(str(tmp_path), memory="8GB")
    shapes = Shapes.of_config(AutoConfig.from_pretrained(tmp_path), "some/model-GPTQ")
    assert any(
        "some/model-GPTQ: its weights are counted as if they were not quantized (gptq)" in n for n in plan(shapes).notes
    )


def test_variants_that_are_alike_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(str(folder), memory="8GB", context=64)
    assert len(found.candidates) > 1
    for most, lines in ((float("inf"), 1), (0, len(found.candidates))):
        monkeypatch.setattr("assisted.lab.plan.choice.ALIKE", most)
        table = str(found).split("Memory of the chosen")[0].splitlines()
        assert sum("yes" in line for line in table) == lines
        assert any(f"({len(found.candidates) - 1} variants)" in line for line in table) == (lines == 1)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nobody/nothing"], "target: 'nobody/nothing' has no config that can be read"),
        (["FOLDER", "--context", "-5"], "context: -5 is not a number of 1 or more"),
        (["FOLDER", "--batch", "0"], "batch: 0 is not a number of 1 or more"),
        (["FOLDER", "--vram=-3GB"], "vram: '-3GB' is not a size; write it as 12GB"),
        (["FOLDER", "--vram", "much"], "vram: 'much' is not a size"),
        (["FOLDER", "--card", "RTX 9999"], "card: 'RTX 9999' is not in the list"),
        (["FOLDER", "--quantization", "int3"], "quantization: 'int3' is not known"),
        (["FOLDER", "--draft", "FOLDER", "--draft-window", "0"], "draft_window: 0 is not possible; give 1 or more"),
        (["FOLDER", "--draft-window", "64"], "draft_window: 64 is not possible, as Suffix keeps no keys and values"),
    ],
)
def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    given = [str(folder) if word == "FOLDER" else word for word in argv]
    defaults = [] if any(word.startswith(("--vram", "--card")) for word in argv) else ["--vram", "8GB"]
    assert main(["plan", *given, *defaults]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_without_the_hub_sizes_come_from_the_cache_or_the_recipes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", card_name="4090")
    sizes = {part.name: part.bytes for part in found.candidates[0].parts}
    assert (sizes["target: weights"], sizes["draft: weights"]) == (2 * 8190735360, 2 * 596049920)
    assert found.use.dtype == torch.bfloat16 and found.download is None
    for name, note in zip(("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"), found.notes, strict=True):
        assert note.startswith(f"{name}: its sizes are those of this package's recipes, since the Hub did not answer (")
    packed = Shapes.read("openai/gpt-oss-20b")  # whose experts are stored in 4.25 bits
    assert packed.quantized == "mxfp4" and 13e9 < packed.stored < 14e9
    assert "of its image-text checkpoint, only the text model is counted" in Shapes.read("google/gemma-3-4b-it").note
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0123abc")
    shutil.copytree(folder, kept / "snapshots" / "0123abc")
    assert Shapes.read("some/model").stored == Shapes.read(str(folder)).stored


def test_broken_weights_are_named(folder: Path, tmp_path: Path) -> None:
    llama(num_hidden_layers=9).save_pretrained(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="a part of the checkpoint is missing"):
        plan(str(tmp_path), memory="8GB")
    for broken in (weights[:20], b"\xff" * 40, b""):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match=r"model\.safetensors is broken"):
            plan(str(tmp_path), memory="8GB")


def test_small_models_are_limited_by_their_layers() -> None:
    found = plan("zoo:target", "zoo:draft", memory="12GB", context=256)
    assert found.download is None and "download" not in str(found)
    assert all(one.speed.plain[1] < 3000 for one in found.candidates)
    assert all(1 <= one.speed.times[1] < 4 for one in found.candidates)


def test_encoder_decoders_are_not_planned(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64}
    config = WhisperConfig(**sizes, decoder_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^target: whisper is an encoder-decoder; only causal LMs can be planned"):
        plan(str(tmp_path))


def test_sizes_and_cards() -> None:
    assert bytes_of("12GB") == bytes_of("12") == 12 * 10**9 and bytes_of("1.5 GiB") == 3 * 2**29 and bytes_of(7) == 7
    assert all(memory >= 8 and rate > 100 for memory, rate in CARDS.values())
    assert expected_tokens(1.0, 3) == 4 and expected_tokens(0.5, 2) == 1.75 and expected_tokens(0.0, 5) == 1


def test_the_command_plans_a_saved_pair(tmp_path: Path) -> None:
    """In a process of its own, which has imported no more than the command does."""
    AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:eagle3").save_pretrained(tmp_path)
    command = [sys.executable, "-m", "assisted", "plan", str(tmp_path), "--device", "cpu", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "EAGLE" in ran.stdout
