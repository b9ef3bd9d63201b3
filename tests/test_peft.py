"""PEFT adapters: in a folder or in memory, around the target or the draft. The text is the adapter's, and drafts count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from pairs import BY_NAME, CALL, no_fallback, prompt, tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.loading.adapters import base_path, has_adapter
from assisted.loading.quantization import load_quantized
from assisted.methods import parse

peft = pytest.importorskip("peft")

TASKS = [None, "CAUSAL_LM"]  # of which peft makes wrappers of different classes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    build(BY_NAME["llama"]).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A folder with an adapter for it, and nothing else."""
    folder = tmp_path / "adapter"
    tuned(base).save_pretrained(folder)
    assert not (folder / "config.json").exists()
    return folder


def lora(**fields: Any) -> Any:
    """A random adapter that changes the text."""
    return peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"], **fields)


def tuned(base: Path, **fields: Any) -> Any:
    """The model of a folder with an adapter around it."""
    torch.manual_seed(0)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(**fields)).eval()


def text(model: Any, **kwargs: Any) -> list[list[int]]:
    return model.generate(input_ids=prompt()["ids"], **(CALL | kwargs)).tolist()


def check(pair: AssistedModelForCausalLM, plain: Any) -> None:
    """The pair says what the adapted model says, and drafts on the way."""
    with no_fallback():
        assert text(pair) == text(plain)
    assert pair.report.drafted > 0


# --- in a folder


def test_a_folder_that_holds_an_adapter_is_a_target(base: Path, adapter: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(adapter)
    assert text(plain) != text(AutoModelForCausalLM.from_pretrained(base))
    pair = AssistedModelForCausalLM.from_pretrained(adapter, draft="ngram", draft_length=4)
    assert type(pair.target) is type(plain)
    assert pair.target.active_adapters() == plain.active_adapters()
    assert pair.tokenizer is not None, "the base model's"
    check(pair, plain)
    pair.target.disable_adapters()
    check(pair, AutoModelForCausalLM.from_pretrained(base))


def dora(base: Path, folder: Path) -> Any:
    """A DoRA adapter whose magnitudes change the text, and its folder."""
    model = tuned(base, use_dora=True)
    with torch.no_grad():
        for name, magnitudes in model.named_parameters():
            if "magnitude" in name:
                magnitudes.mul_(torch.linspace(0.2, 4, magnitudes.numel()).view_as(magnitudes))
    model.save_pretrained(folder)
    return model


def test_the_magnitudes_of_dora_are_read(base: Path, tmp_path: Path) -> None:
    """transformers (5.23, 5.24) reads a DoRA adapter without them (findings/dora_magnitudes.sh)."""
    plain = dora(base, tmp_path / "adapter")
    pair = AssistedModelForCausalLM.from_pretrained(tmp_path / "adapter", draft="ngram", draft_length=4)
    check(pair, plain)
    pair.save_pretrained(tmp_path / "pair")
    check(AssistedModelForCausalLM.from_pretrained(tmp_path / "pair", draft_length=4), plain)
    pair = AssistedModelForCausalLM.from_models(plain, draft=tmp_path / "adapter", draft_length=4)
    check(pair, plain)
    assert pair.report.acceptance_rate == 1


def test_magnitudes_of_other_modules(base: Path, tmp_path: Path) -> None:
    dora(base, tmp_path)
    where = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "another"): tensor for name, tensor in load_file(where).items()}, where)
    with pytest.raises(ValueError, match=r"target: the magnitudes of the DoRA adapter .*another.* from_models"):
        AssistedModelForCausalLM.from_pretrained(tmp_path)


def test_a_draft_with_an_adapter_whose_files_lack_something(base: Path, tmp_path: Path) -> None:
    """What AdaLoRA's files leave out is no random number."""
    config = peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path)
    pair = AssistedModelForCausalLM.from_pretrained(base, draft=str(tmp_path), draft_length=4)
    check(pair, AutoModelForCausalLM.from_pretrained(base))


def test_arguments_reach_the_base_model(adapter: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(adapter, dtype=torch.bfloat16, adapter_kwargs={"subfolder": ""})
    assert pair.dtype == torch.bfloat16
    assert has_adapter(pair.target)


def test_a_tokenizer_beside_the_adapter_comes_first(adapter: Path) -> None:
    tokenizer(first="$").save_pretrained(adapter)
    pair = AssistedModelForCausalLM.from_pretrained(adapter)
    assert pair.tokenizer.get_vocab() == tokenizer(first="$").get_vocab()


def test_an_adapter_beside_a_model(base: Path, tmp_path: Path) -> None:
    build(BY_NAME["llama"]).save_pretrained(tmp_path)
    tuned(base).save_pretrained(tmp_path)
    pair = AssistedModelForCausalLM.from_pretrained(tmp_path, draft="ngram", draft_length=4)
    assert pair.target.name_or_path == str(tmp_path)
    check(pair, AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_without_peft_the_error_names_it(base: Path, adapter: Path, role: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("assisted.loading.adapters.is_peft_available", lambda: False)
    where = {"target": base, "draft": base} | {role: adapter}
    with pytest.raises(ImportError, match=f"{role}: .*pip install peft"):
        AssistedModelForCausalLM.from_pretrained(where["target"], draft=where["draft"])


def test_peft_is_not_imported_for_other_models(base: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert base_path(str(base), "target") == str(base)
    assert not has_adapter(build(BY_NAME["llama"]))


def test_an_adapter_that_says_no_base_model(adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"target: .*does not name its base model"):
        AssistedModelForCausalLM.from_pretrained(adapter)


def test_a_folder_that_holds_an_adapter_is_a_draft(base: Path, adapter: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(adapter)
    pair = AssistedModelForCausalLM.from_pretrained(base, draft=str(adapter), draft_length=4)
    assert has_adapter(pair.drafter.model)
    assert pair.drafter.tokenizer is not None, "the base model's"
    check(pair, AutoModelForCausalLM.from_pretrained(base))
    pair = AssistedModelForCausalLM.from_models(target, draft=adapter, draft_length=4)
    check(pair, target)
    assert pair.report.acceptance_rate == 1, "the adapter counts in both"


@pytest.mark.quant
@pytest.mark.filterwarnings("ignore:.*layers stay unquantized")
def test_the_base_model_of_a_draft_is_quantized(base: Path, adapter: Path, tmp_path: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(
        base, draft=str(adapter), draft_quantization="int8-torchao", draft_length=4
    )
    assert has_adapter(pair.drafter.model)
    assert pair.drafter.model.config.quantization_config is not None
    check(pair, AutoModelForCausalLM.from_pretrained(base))


# --- in memory


@pytest.mark.parametrize("task", TASKS)
def test_a_wrapped_draft_is_a_draft(base: Path, task: str | None) -> None:
    model = tuned(base, task_type=task)
    assert not isinstance(model, PreTrainedModel)
    assert parse(model) == DraftModel(model)
    for draft in (model, DraftModel(model)):
        pair = AssistedModelForCausalLM.from_models(model, draft=draft, draft_length=4)
        check(pair, model)
        assert pair.report.acceptance_rate == 1
        with model.disable_adapter():
            check(pair, model)
            assert pair.report.acceptance_rate == 1
    with pytest.raises(ValueError, match="draft_quantization"):
        parse(model, "nf4")


def test_a_wrapped_draft_of_a_path(base: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(base, draft=["ngram", tuned(base)], draft_length=4)
    check(pair, AutoModelForCausalLM.from_pretrained(base))


@pytest.mark.parametrize("draft", ["suffix", "recycle", "early-exit:1", "layer-skip"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_targets(base: Path, wrapped: bool, draft: str) -> None:
    model: Any = tuned(base) if wrapped else AutoModelForCausalLM.from_pretrained(base)
    if not wrapped:
        torch.manual_seed(0)
        model.add_adapter(lora())
    check(AssistedModelForCausalLM.from_models(model, draft=draft, draft_length=4), model)


@pytest.mark.parametrize("task", TASKS)
def test_a_generation_config_of_a_wrapper_holds(base: Path, task: str | None) -> None:
    model = tuned(base, task_type=task)
    pair = AssistedModelForCausalLM.from_models(model, draft="ngram", draft_length=4)
    for owner, tokens in ((pair, 3), (model, 5)):
        owner.generation_config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        assert pair.generation_config.max_new_tokens == tokens
        ids = prompt()["ids"]
        assert pair.generate(ids).shape[1] == ids.shape[1] + tokens


AROUND = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "activated by tokens": lambda: lora(task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]),
    "one for each task": lambda: peft.PolyConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], n_tasks=2),
}


@pytest.mark.parametrize("kind", AROUND)
def test_adapters_around_the_model_are_refused(base: Path, kind: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), AROUND[kind]())
    with pytest.raises(ValueError, match=r"target: .*adapter 'default' .*cannot be assisted"):
        AssistedModelForCausalLM.from_models(model, draft="suffix")
    with pytest.raises(ValueError, match=r"draft: .*adapter 'default' .*cannot be assisted"):
        AssistedModelForCausalLM.from_models(plain, draft=model)


@pytest.mark.quant
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_quantized_copy_of_a_target_with_an_adapter_is_refused(base: Path, wrapped: bool) -> None:
    model: Any = tuned(base)
    if not wrapped:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.add_adapter(lora())
    with pytest.raises(ValueError, match=r"merge_and_unload"):
        AssistedModelForCausalLM.from_models(model, draft="self:int8-torchao")


# --- saved


@pytest.mark.parametrize("by_path", [True, False])
def test_saved_and_read_back(base: Path, adapter: Path, by_path: bool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(adapter)
    if by_path:
        pair = AssistedModelForCausalLM.from_pretrained(adapter, draft=str(adapter), draft_length=4)
    else:
        pair = AssistedModelForCausalLM.from_models(tuned(base), draft=tuned(base), draft_length=4)
    pair.save_pretrained(tmp_path / "pair")
    for part in ("target", "draft"):
        assert (tmp_path / "pair" / part / "adapter_model.safetensors").is_file()
        assert not (tmp_path / "pair" / part / "model.safetensors").exists()
    for again in (AssistedModelForCausalLM, AutoModelForCausalLM):
        read = again.from_pretrained(tmp_path / "pair")
        check(read, model)
        assert read.report.acceptance_rate == 1


@pytest.mark.quant
@pytest.mark.filterwarnings("ignore:.*layers stay unquantized")
@pytest.mark.parametrize("name", ["int8-torchao", "int4"])
def test_a_quantized_draft_with_an_adapter_is_saved(base: Path, adapter: Path, name: str, tmp_path: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(base, draft=str(adapter), draft_quantization=name)
    pair.save_pretrained(tmp_path / "pair")
    read = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    ids = prompt()["ids"]
    assert torch.equal(read.drafter.model(ids).logits, pair.drafter.model(ids).logits)
    assert has_adapter(read.drafter.model)


def test_a_saved_adapter_names_the_model_that_it_was_at_work_in(base: Path, tmp_path: Path) -> None:
    build(BY_NAME["llama"]).save_pretrained(tmp_path / "both")
    tuned(base).save_pretrained(tmp_path / "both")
    pair = AssistedModelForCausalLM.from_pretrained(tmp_path / "both", draft="ngram", draft_length=4)
    pair.save_pretrained(tmp_path / "pair")
    saved = json.loads((tmp_path / "pair" / "target" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "both")
    check(AssistedModelForCausalLM.from_pretrained(tmp_path / "pair"), pair.target)


@pytest.mark.parametrize("names", [["other"], ["default", "other"]])
def test_adapters_that_would_not_be_read_back_are_not_saved(base: Path, names: list[str], tmp_path: Path) -> None:
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora())
    pair = AssistedModelForCausalLM.from_models(model, draft="suffix")
    with pytest.raises(ValueError, match=r"target: .*other"):
        pair.save_pretrained(tmp_path)


@pytest.mark.quant
def test_a_quantized_draft_that_no_path_leads_to_is_not_saved(base: Path, tmp_path: Path) -> None:
    model = peft.get_peft_model(load_quantized(str(base), "int8-torchao"), lora())
    pair = AssistedModelForCausalLM.from_models(AutoModelForCausalLM.from_pretrained(base), draft=model)
    with pytest.raises(ValueError, match=r"draft: .*cannot be saved"):
        pair.save_pretrained(tmp_path / "pair")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_adapter_of_a_model_made_in_memory_is_not_saved(base: Path, role: str, tmp_path: Path) -> None:
    model = peft.get_peft_model(build(BY_NAME["llama"]), lora())
    plain = AutoModelForCausalLM.from_pretrained(base)
    target, draft = (model, "suffix") if role == "target" else (plain, model)
    pair = AssistedModelForCausalLM.from_models(target, draft=draft)
    with pytest.raises(ValueError, match=f"{role}: .*merge_and_unload"):
        pair.save_pretrained(tmp_path / "pair")


@pytest.mark.parametrize("whole", ["input_layernorm", "norm", "mlp"])
def test_modules_that_were_trained_whole_are_switched(base: Path, whole: str) -> None:
    """Faster layers are made of a model's modules; behind a wrapper of peft there are two."""
    model = tuned(base, modules_to_save=[whole])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.mul_(1 + 0.5 * torch.randn_like(weight))
    pair = AssistedModelForCausalLM.from_models(model, draft=model, draft_length=4)
    check(pair, model)
    with model.disable_adapter():
        check(pair, model)
    check(pair, model)


def test_trained_norms(base: Path) -> None:
    config = peft.LNTuningConfig(target_modules=["input_layernorm"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    check(AssistedModelForCausalLM.from_models(model, draft=model, draft_length=4), model)
