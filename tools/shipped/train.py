"""Training the shipped models: `python -m tools.shipped train NAME`. Seeded, resumable, offline.

The package's trainer does it: early-exit training for the target, distillation for its draft, and training on the text for
the draft with another tokenizer. Knows tokenizers and untrained models; shapes and rates are in shapes.py.

The shipped weights are older than this file: shapes, steps and rates are the same, but `assisted/zoo/train.py` of commit
4daeefa trained them, in a loop that drew other windows and did not decay the embedding. To reproduce them, run that commit with
the libraries of its time. This file trains models like them.
"""

from __future__ import annotations

import json
import math
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from assisted.lab.training import trainer
from assisted.methods.draft_model.train import Distillation, DistillSettings
from assisted.methods.early_exit.train import EarlyExitSettings, EarlyExitTraining
from assisted.methods.shared.training.data import Windows, read_text
from assisted.methods.shared.training.method import Method
from assisted.zoo import corpus

from .shapes import RECIPES, Recipe

__all__ = ["build_model", "join", "train", "train_tokenizer"]

END, PAD = "<|endoftext|>", "<|pad|>"
TEXT_ONLY = EarlyExitSettings(dropout=0.0, exit_weight=0.0)
CONTEXT = 1024  # the longest context any phase trains at, and the models' stated limit
# Text as it is, one turn after another: the models complete Python files, so a "chat" is a file that two people write.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def train_tokenizer(vocab_size: int, folder: Path, pieces: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` entries, trained on the training text and saved to `folder`.

    pieces: a regular expression. No token crosses the borders of its matches; None takes that of GPT-2.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces is None)
    if pieces is None:
        tokenizer.pre_tokenizer = to_bytes
    else:
        cut = pre_tokenizers.Split(Regex(pieces), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((corpus.read(p) for p in corpus.training_files()), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def build_model(recipe: Recipe) -> PreTrainedModel:
    """The untrained model of a recipe, float32, seeded."""
    torch.manual_seed(recipe.seed)
    shape = recipe.shape
    common: dict[str, Any] = {
        "vocab_size": recipe.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "dtype": "float32",
    }
    if recipe.full_attention_interval is None:
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common))
    else:
        model = Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **common,
                full_attention_interval=recipe.full_attention_interval,
                linear_num_key_heads=shape.heads,
                linear_num_value_heads=shape.heads,
                linear_key_head_dim=32,
                linear_value_head_dim=64,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [6, 5, 5],
                },
            )
        )
    with torch.no_grad():  # residual branches start small: a deep and narrow model then trains faster
        for name, matrix in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                matrix.mul_(1 / math.sqrt(2 * shape.layers))
    return model


def batches(stream: np.ndarray, recipe: Recipe) -> Callable[[int], torch.Tensor]:
    """The ids of each step of a whole run, [batch, context] int64 as its phase has it."""
    ends = list(accumulate(phase.steps for phase in recipe.phases))
    windows = [Windows(stream, p.context, p.batch, recipe.seed + number) for number, p in enumerate(recipe.phases)]

    def batch(step: int) -> torch.Tensor:
        number = bisect_right(ends, step)
        return windows[number][step - ends[number] + recipe.phases[number].steps]

    return batch


def train(name: str, out: Path, compile_layers: bool = True, stop_after: int | None = None) -> Path:
    """Train one shipped model, from random weights or from its checkpoint, into `out/name`.

    Args:
        name: a name of RECIPES. A distilled model needs its teacher in `out` first.
        out: the folder of all shipped models.
        compile_layers: torch.compile every layer: about 1.5 times faster after a minute of compiling.
        stop_after: stop, with a checkpoint, after this many steps in all.

    Returns the model's folder.

    Raises ValueError for an unknown name or a missing teacher.
    """
    if name not in RECIPES:
        raise ValueError(f"name: {name!r} is not a shipped model; one of {', '.join(RECIPES)}")
    recipe, folder = RECIPES[name], out / name
    teacher = _teacher(recipe, out)
    tokenizer = _tokenizer(recipe, out)
    text = read_text(tokenizer, ["zoo"])
    trainer.train(
        _method(recipe, tokenizer, teacher, compile_layers),
        text,
        recipe.plan,
        folder,
        stop_after,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        notes={"recipe": asdict(recipe)},
        store=torch.bfloat16,
        batches=batches(text.training, recipe),
    )
    config = folder / "config.json"
    if config.exists():  # files are half as large in bfloat16, but on a CPU float32 is the exact and faster type
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}, indent=2) + "\n")
    return folder


def join(folder: Path, head: Path) -> None:
    """Put a trained MTP head into the checkpoint of its target, as publishers do. folder, head: of the two."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | load_file(head / "model.safetensors"), file, {"format": "pt"})
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "mtp_num_hidden_layers": 1}, indent=2) + "\n")


def _method(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, teacher: LlamaForCausalLM | None, compiled: bool
) -> Method:
    model = build_model(recipe)
    for one in (model, teacher):
        if one is not None and not torch.cuda.is_available():
            one.set_attn_implementation("eager")  # its compiled backward is faster than that of sdpa on a CPU
    if teacher is None:
        return EarlyExitTraining(model, tokenizer, recipe.exits or TEXT_ONLY, recipe.seed, compiled)
    if teacher.config.hidden_size == model.config.hidden_size:
        model.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
        model.model.norm.load_state_dict(teacher.model.norm.state_dict())
    return Distillation(teacher, tokenizer, DistillSettings(draft="untrained", loss="kl+tv"), compiled, student=model)


def _teacher(recipe: Recipe, out: Path) -> LlamaForCausalLM | None:
    if recipe.teacher is None:
        return None
    if not (out / recipe.teacher / "model.safetensors").exists():
        raise ValueError(f"name: {recipe.name!r} is distilled from {recipe.teacher!r}; train that one first")
    return LlamaForCausalLM.from_pretrained(out / recipe.teacher, dtype=torch.float32)


def _tokenizer(recipe: Recipe, out: Path) -> PreTrainedTokenizerFast:
    if recipe.tokenizer is not None:
        return AutoTokenizer.from_pretrained(out / recipe.tokenizer)
    folder = out / recipe.name
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    return train_tokenizer(recipe.vocab_size, folder, recipe.pieces)
