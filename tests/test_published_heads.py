"""The shipped heads in the layouts that trainers publish, rebuilt from their sources: each loads, writes what plain `generate`
writes, and takes as many forward passes as the shipped head. `PUBLISHED` is the table of layouts, with the source of each."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import features_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.lab.handover import hand_over
from assisted.lab.plan import plan
from assisted.methods.eagle.formats import LAYOUTS, load_eagle, require_eagle
from assisted.methods.medusa.head import MedusaHeads
from assisted.methods.shared.registry import kind_of

Fields = dict[str, Any]
Tensors = dict[str, torch.Tensor]
V, LAYERS = 4096, 16
WHOLE, REDUCED = 3.88, 2.58
"""Tokens per forward pass of the shipped head, and of the same head with every second token."""
_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "fc_norm")


@functools.cache
def shipped(name: str = "eagle3", file: str = "model.safetensors") -> tuple[Fields, Tensors]:
    folder = Path(zoo.folder(name))
    return json.loads((folder / "config.json").read_text()), load_file(folder / file)


@functools.cache
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("target")).eval()


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(zoo.folder("target"))


@functools.cache
def prompt() -> dict[str, torch.Tensor]:
    return dict(tokenizer()("def mean(values):\n    total = 0\n", return_tensors="pt"))


@functools.cache
def plain() -> torch.Tensor:
    return target().generate(**prompt(), max_new_tokens=32, do_sample=False)


def reduced(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    keep = torch.arange(0, V, 2)
    maps = {
        "d2t": keep - torch.arange(len(keep)),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, keep, True),
    }
    return fields | {"draft_vocab_size": len(keep)}, tensors | {
        "lm_head.weight": tensors["lm_head.weight"][keep]
    } | maps


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + name.removeprefix(old) if name.startswith(old) else name: part for name, part in tensors.items()}


def without(some: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in some.items() if name not in names}


def flat(tensors: Tensors) -> Tensors:
    return renamed(tensors, "midlayer.", "layers.0.")


def modelopt(fields: Fields) -> Fields:
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    nested = {**fields["eagle_config"], **flags, "next_layer_regular": True, "parallel_draft_step": 1}
    return fields | {"rope_scaling": {"rope_type": "default", "rope_theta": 10000}, "eagle_config": nested}


def in_model(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """Automodel's configs say nothing of the target's layers."""
    own = {
        name if name in ("lm_head.weight", "d2t", "t2d") else f"model.{name}": t for name, t in flat(tensors).items()
    }
    return without(fields, "eagle_config") | {"architectures": ["LlamaEagle3DraftModel"]}, own


def nested(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    inner = fields["eagle_config"] | {name: fields[name] for name in _NORMS}
    return without(fields, *_NORMS) | {"eagle_config": inner}, tensors


def deepspec(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    own = without(fields, "eagle_config", "draft_vocab_size", "target_hidden_size")
    own |= {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 7, 12], "layer_types": ["full_attention"]}
    copy = target().get_input_embeddings().weight.detach().to(torch.bfloat16)
    return own | {"num_target_layers": LAYERS, "ttt_length": 7}, flat(tensors) | {"embed_tokens.weight": copy}


def speculators(fields: Fields, tensors: Tensors, **layer: Any) -> tuple[Fields, Tensors]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta")
    own = {name: fields[name] for name in ("norm_before_residual", "fc_norm", "draft_vocab_size")}
    own |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], _IDS: [2, 8, 13]}
    inner = {"model_type": "llama", **{name: fields[name] for name in names}, **layer}
    return own | {"transformer_layer_config": inner}, flat(tensors)


def angelslim(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    """Its configs have the target's base of positions, with which no head was trained."""
    own = without(fields, "eagle_config") | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6}
    copy = target().get_input_embeddings().weight.detach().to(torch.bfloat16)
    return own | {"aux_hidden_states_layer_ids": [1, 7, 12]}, tensors | {"embed_tokens.weight": copy}


@dataclass(frozen=True)
class Published:
    """A layout: who says so, where and when, and how the shipped head is written in it."""

    source: str
    made: Callable[[Fields, Tensors], tuple[Fields, Tensors]]
    tokens: float = WHOLE


_MODELOPT = "NVIDIA/Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py, 2026-08-21"
PUBLISHED = {
    "shipped": Published("SafeAILab/EAGLE eagle/model/cnets.py, 2026-02-19", lambda c, w: (c, w)),
    "ModelOpt": Published(_MODELOPT, lambda c, w: (modelopt(c), flat(w))),
    "ModelOpt, d2t alone": Published(
        _MODELOPT, lambda c, w: (modelopt(reduced(c, w)[0]), without(flat(reduced(c, w)[1]), "t2d")), REDUCED
    ),
    "ModelOpt, d2t alone, midlayer": Published(
        "NVIDIA/Model-Optimizer pull 293, 2025-09-05",
        lambda c, w: (reduced(c, w)[0], without(reduced(c, w)[1], "t2d")),
        REDUCED,
    ),
    "flags in eagle_config": Published("vllm-project/vllm pull 42143, 2026-05-09", nested),
    "NeMo Automodel": Published(
        "NVIDIA-NeMo/Automodel components/speculative/eagle/draft_llama.py, 2026-08-22",
        lambda c, w: in_model(*reduced(c, w)),
        REDUCED,
    ),
    "SpecForge, whole vocabulary": Published(
        "sgl-project/SpecForge specforge/export/to_sglang.py, 2026-08-08",
        lambda c, w: (c, w | {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}),
    ),
    "layers of the target": Published(
        "sgl-project/sglang pull 33966, 2026-08-07", lambda c, w: (c | {"num_hidden_layers": LAYERS}, w)
    ),
    "AngelSlim": Published(
        "angelslim 0.5.0 compressor/speculative/train/models/draft/llama_eagle3.py",
        lambda c, w: angelslim(*reduced(c, w)),
        REDUCED,
    ),
    "rotary buffer": Published(
        "SafeAILab/EAGLE eagle/model/cnets.py, whose buffers were persistent, 2026-02-19",
        lambda c, w: (c, w | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(32)}),
    ),
    "states in eagle_config": Published(
        "sgl-project/sglang pull 25454, 2026-05-16",
        lambda c, w: (without(c, "qkv_bias") | {"eagle_config": {_IDS: [2, 8, 13]}}, w),
    ),
    "DeepSpec": Published("deepseek-ai/DeepSpec deepspec/modeling/eagle3/qwen3/config.py, 2026-06-30", deepspec),
    "speculators": Published("vllm-project/speculators models/eagle3/config.py, 2026-08-20", speculators),
    "speculators, sliding window": Published(
        "vllm-project/speculators models/eagle3/core.py, 2026-08-20",
        functools.partial(speculators, layer_types=["sliding_attention"], sliding_window=512),
    ),
    "d2t in floating point": Published(
        "offsets that a cast of the whole head has made floating point", lambda c, w: cast(*reduced(c, w)), REDUCED
    ),
}


def cast(fields: Fields, tensors: Tensors) -> tuple[Fields, Tensors]:
    return fields, tensors | {"d2t": tensors["d2t"].float()}


def write(folder: Path, fields: Fields, tensors: Tensors, shards: int = 1) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {name: f"model-{1 + number % shards:05}-of-{shards:05}.safetensors" for number, name in enumerate(held)}
    for file in {*places.values()}:
        save_file({name: held[name] for name in held if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def tokens_of(draft: Any) -> float:
    """Tokens per forward pass of a pair, which writes what plain `generate` writes."""
    pair = AssistedModelForCausalLM.from_models(target(), draft=draft, draft_length=4)
    assert pair.generate(**prompt(), max_new_tokens=32, do_sample=False).equal(plain())
    assert pair.report is not None
    return round(pair.report.tokens_per_pass, 2)


@torch.no_grad()
def said_by(head: Any) -> torch.Tensor:
    """Its logits over two steps after the prompt, [2, n, V]."""
    ids = prompt()["input_ids"]
    states, embeddings = head.fuse(features_of(target(), head, ids)[:, :-1]), head.embed(ids[:, 1:], target())
    said = []
    for _ in range(2):
        states = head(embeddings, states)
        said.append(head.over_all(head.logits(states, target()))[0])
    return torch.stack(said)


@functools.cache
def expected(tokens: float) -> torch.Tensor:
    """What the shipped head says, of all tokens or of every second one."""
    said = said_by(load_eagle(zoo.folder("eagle3"), target()))
    if tokens == REDUCED:
        said[..., 1::2] = -torch.inf
    return said


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layout_says_what_the_shipped_head_says(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    folder = write(tmp_path, *published.made(*shipped()))
    assert kind_of(folder) == "eagle"
    assert torch.equal(said_by(load_eagle(folder, target())), expected(published.tokens))


def test_several_files_with_an_index(tmp_path: Path) -> None:
    folder = write(tmp_path, *shipped(), shards=3)
    assert kind_of(folder) == "eagle"
    assert tokens_of(f"eagle:{folder}") == WHOLE
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^draft: .*weight_map: model-00002-of-00003\.safetensors is missing"):
        load_eagle(folder, target())


def test_no_output_embedding(tmp_path: Path) -> None:
    fields, tensors = shipped()
    copy = target().get_output_embeddings().weight.detach().to(torch.bfloat16)
    found = []
    for number, held in enumerate((tensors | {"lm_head.weight": copy}, without(tensors, "lm_head.weight"))):
        (folder := tmp_path / str(number)).mkdir()
        found.append(tokens_of(f"eagle:{write(folder, fields, held)}"))
    assert found[0] == found[1] != WHOLE


OFTEN = ("shipped", "NeMo Automodel", "DeepSpec", "speculators, sliding window")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in PUBLISHED]
)
def test_a_saved_pair_of_a_layout(name: str, tmp_path: Path) -> None:
    """Writes the same tokens again, with as many forward passes; planning and handing over know its method."""
    (given := tmp_path / "given").mkdir()
    fields, tensors = PUBLISHED[name].made(*shipped())
    folder = write(given, fields, tensors)
    pair = AssistedModelForCausalLM.from_models(
        target(), draft=f"eagle:{folder}", draft_length=4, tokenizer=tokenizer()
    )
    pair.save_pretrained(saved := tmp_path / "saved")
    again = AssistedModelForCausalLM.from_pretrained(saved)
    assert again.generate(**prompt(), max_new_tokens=32, do_sample=False).equal(plain())
    assert again.report is not None
    assert round(again.report.tokens_per_pass, 2) == PUBLISHED[name].tokens
    assert again.drafter.head.config == pair.drafter.head.config
    planned = plan(str(saved), device="cpu")
    assert planned.draft == f"eagle:{saved / 'draft'}"
    counted = {part.name: part.bytes for part in planned.candidates[0].parts}
    stored = sum(tensor.numel() for tensor in load_file(saved / "draft" / "model.safetensors").values())
    assert counted["draft: EAGLE heads"] in (2 * stored, 4 * stored)
    assert plan("zoo:target", str(folder), device="cpu").candidates[0].parts[2].name == "draft: EAGLE heads"
    if "sliding window" in name:
        with pytest.raises(ValueError, match="draft: the EAGLE-3 head has a sliding window"):
            hand_over("vllm", saved, tmp_path / "out")
    else:
        assert hand_over("vllm", saved, tmp_path / "out").method == "eagle3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": torch.arange(V // 2) + 0.5}, "d2t: it holds fractions"),
        ({"d2t": torch.arange(V // 2) * 2}, "d2t: its ids are not 2048 different tokens of the target's 4096"),
        ({"t2d": torch.ones(V, dtype=torch.bool)}, "t2d and d2t that name different tokens"),
        (
            {"midlayer.fc.weight": torch.ones(2)},
            "EAGLE-3 head of its authors, .* has an unknown tensor midlayer.fc.weight",
        ),
        ({"layers.0.hidden_norm.weight": torch.ones(2)}, "has an unknown tensor layers.0.hidden_norm.weight"),
        ({"model.scale": torch.ones(2)}, "has an unknown tensor model.scale"),
    ],
)
def test_what_could_change_the_output_is_an_error(change: Tensors, said: str, tmp_path: Path) -> None:
    fields, tensors = reduced(*shipped())
    with pytest.raises(ValueError, match=rf"^draft: .*{said}"):
        load_eagle(write(tmp_path, fields, tensors | change), target())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": torch.arange(V).flip(0) - torch.arange(V)}, "d2t: its offsets exchange tokens of a full vocabulary"),
        ({"t2d": torch.arange(V) > 0}, "t2d and d2t that name different tokens"),
    ],
)
def test_maps_of_a_whole_vocabulary(change: Tensors, said: str, tmp_path: Path) -> None:
    fields, tensors = shipped()
    with pytest.raises(ValueError, match=rf"^draft: .*{said}"):
        load_eagle(write(tmp_path, fields, tensors | change), target())


def test_a_message_names_the_layout_and_what_differs(tmp_path: Path) -> None:
    fields, tensors = in_model(*reduced(*shipped()))
    tensors["model.extra.weight"] = tensors.pop("model.layers.0.hidden_norm.weight")
    said = r"an EAGLE-3 head of NeMo Automodel, lacks tensor model.layers.0.hidden_norm.weight and has an unknown "
    said += "tensor model.extra.weight"
    with pytest.raises(ValueError, match=said):
        load_eagle(write(tmp_path, fields, tensors), target())


REFUSED = {
    "NeMo Automodel, EAGLE-1": Published(
        "NVIDIA-NeMo/Automodel components/speculative/eagle/draft_llama_v12.py, 2026-08-22",
        lambda c, w: (c | {"architectures": ["LlamaEagleDraftModel"]}, without(flat(w), "layers.0.hidden_norm.weight")),
    ),
    "latent attention (MLA)": Published(
        "sgl-project/sglang pull 26506, 2026-05-27",
        lambda c, w: (c, renamed(w, "midlayer.self_attn.k_proj.", "midlayer.self_attn.kv_a_proj_with_mqa.")),
    ),
}
SAID = {
    "NeMo Automodel, EAGLE-1": "it has an input_layernorm in its first layer and a norm after its last one",
    "latent attention (MLA)": "heads with layers of Llama and Qwen3 can",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, *REFUSED[name].made(*shipped()))
    assert kind_of(folder) == "eagle"
    for read in (load_eagle, require_eagle):
        with pytest.raises(ValueError, match=rf"^draft: .*{SAID[name]}"):
            read(folder, target())


@pytest.mark.documents
def test_the_pages_table() -> None:
    """It has what the tests above have found."""
    rows = ["| layout | source | loads | tokens per forward pass |", "|---|---|---|---|"]
    rows += [f"| {name} | {one.source} | yes | {one.tokens} |" for name, one in PUBLISHED.items()]
    rows += [f"| {name} | {one.source} | no: {SAID[name]} | |" for name, one in REFUSED.items()]
    page = Path("docs/methods/eagle.md").read_text(encoding="utf-8")
    assert "\n".join(rows) == page.split("<!-- published:begin -->\n")[1].split("\n<!-- published:end -->")[0]


# ---- Medusa


@pytest.mark.parametrize(
    ("shards", "begin", "title"),
    [(1, "medusa_head", "Medusa-2"), (2, "medusa_head", "Medusa-2"), (1, "medusa_heads", "ModelOpt")],
)
def test_medusa_heads_beside_their_model(shards: int, begin: str, title: str, tmp_path: Path) -> None:
    """Whole-model repositories of Medusa-2: FasterDecoding/Medusa medusa/model/medusa_model_new.py, 2024-04-18. And what
    nvidia-modelopt 0.47.0 saves (modelopt/torch/speculative/plugins/hf_medusa.py)."""
    fields, heads = shipped("medusa", "medusa_lm_head.safetensors")
    if title == "ModelOpt":
        fields = {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1}}
    model = json.loads(Path(zoo.folder("target"), "config.json").read_text())
    tensors = {name: tensor.clone() for name, tensor in target().state_dict().items()}
    tensors |= {f"{begin}.{name}": tensor for name, tensor in heads.items()}
    folder = write(tmp_path, model | fields, tensors, shards)
    assert kind_of(folder) == "medusa"
    found = tokens_of(f"medusa:{folder}")
    assert found == tokens_of("zoo:medusa") > 1.5
    tensors[f"{begin}.extra.weight"] = torch.ones(2)
    with pytest.raises(ValueError, match=rf"{title}.* beside their model, has an unknown tensor {begin}.extra.weight"):
        MedusaHeads.load(write(tmp_path, model | fields, tensors, shards), target())


def test_every_layout_of_the_reader_is_in_the_table(tmp_path: Path) -> None:
    """And is the one that fits best."""
    named = set()
    for published in PUBLISHED.values():
        fields, tensors = published.made(*shipped())
        with pytest.raises(ValueError, match=r"unknown tensor extra\.weight") as caught:
            load_eagle(write(tmp_path, fields, tensors | {"extra.weight": torch.ones(2)}), target())
        named |= {layout.title for layout in LAYOUTS[3] if layout.title in str(caught.value)}
    assert named == {layout.title for layout in LAYOUTS[3]}
