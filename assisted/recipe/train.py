"""Training the shipped models: `assisted zoo train NAME`. Seeded, resumable, offline.

A step is a function of (seed, step) and the state alone, so an interrupted run resumes to the same weights.
Knows plain language-model training, the early-exit recipe and distillation; the shapes and rates are in recipe.py.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..training import checkpoints
from ..training.early_exit import dropped_layers
from ..zoo import corpus
from .shapes import RECIPES, Recipe

__all__ = ["build_model", "encode", "train", "train_tokenizer"]

END, PAD = "<|endoftext|>", "<|pad|>"
CONTEXT = 1024  # the longest context any phase trains at, and the models' stated limit
EXIT_WEIGHT = 0.4  # of the one early-exit loss a step, for an exit at full depth
MAX_LAYER_DROPOUT = 0.1  # LayerSkip's p_max
CHECKPOINT_EVERY = 100  # steps
# Text as it is, one turn after another: the models complete Python files, so a "chat" is a file in two hands.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def train_tokenizer(vocab_size: int, folder: Path, pieces: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` entries learned from the training text, saved to `folder`.

    pieces: a regular expression whose matches no token crosses; None takes GPT-2's.
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


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """The untrained model of a recipe, float32, seeded."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # residual branches start small: deep and narrow trains faster so
        for layer in model.model.layers:
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                matrix.mul_(1 / math.sqrt(2 * recipe.layers))
    return model


def encode(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> np.ndarray:
    """All files as one stream of ids with an end token after each. Returns [N] uint16."""
    texts = [corpus.read(p) for p in files]
    pieces = [np.asarray([*e.ids, 0], dtype=np.uint16) for e in tokenizer.backend_tokenizer.encode_batch(texts)]
    return np.concatenate(pieces)


def windows(stream: np.ndarray, recipe: Recipe) -> Iterator[torch.Tensor]:
    """The batches of a whole run, [batch, context + 1] int64 each: every window once an epoch, in seeded order."""
    for number, phase in enumerate(recipe.phases):
        if len(stream) < 2 * phase.context + 2:
            raise ValueError(f"stream: {len(stream)} tokens are too few for windows of {phase.context} tokens")
        drawn = 0
        order: list[int] = []
        for _ in range(phase.steps):
            while len(order) < phase.batch:
                rng = np.random.default_rng((recipe.seed, number, drawn))
                shift = int(rng.integers(phase.context))
                starts = np.arange(shift, len(stream) - phase.context - 1, phase.context)
                order += rng.permutation(starts).tolist()
                drawn += 1
            batch, order = order[: phase.batch], order[phase.batch :]
            ids = np.stack([stream[s : s + phase.context + 1] for s in batch]).astype(np.int64)
            half = phase.context // 2
            copied = np.random.default_rng((recipe.seed, *batch)).random(phase.batch) < phase.copies
            ids[copied, half + 1 :] = ids[copied, 1 : phase.context + 1 - half]
            yield torch.from_numpy(ids)


def hidden_states(
    model: LlamaForCausalLM, ids: torch.Tensor, skipped: frozenset[int] = frozenset(), exit_layer: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Final and (if asked) early-exit states, both through the shared norm. [B, T] int64 -> [B, T, H] each."""
    base = model.model
    hidden = base.embed_tokens(ids)
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device)[None]
    ahead = None  # sdpa knows by itself
    if model.config._attn_implementation == "eager":
        dtype = torch.get_autocast_dtype(ids.device.type) if torch.is_autocast_enabled(ids.device.type) else model.dtype
        ahead = torch.full((length, length), float("-inf"), dtype=dtype, device=ids.device).triu(1)[None, None]
    rotary = base.rotary_emb(hidden, positions)
    early = None
    for number, layer in enumerate(base.layers):
        if number not in skipped:
            hidden = layer(hidden, attention_mask=ahead, position_ids=positions, position_embeddings=rotary)
        if number + 1 == exit_layer:
            early = base.norm(hidden)
    return base.norm(hidden), early


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Flattened slices: the logits of a whole batch would not stay in a CPU's caches, or fill an accelerator's memory."""
    rows = 1024 if tensors[0].device.type == "cpu" else 2**15
    yield from zip(*(t.flatten(0, 1).split(rows) for t in tensors), strict=True)


def text_loss(model: LlamaForCausalLM, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats. hidden [B, T, H], labels [B, T] -> scalar."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for states, wanted in _chunks(hidden, labels):
        total = total + F.cross_entropy(model.lm_head(states).float(), wanted, reduction="sum")
    return total / labels.numel()


def distillation_loss(
    student: LlamaForCausalLM, hidden: torch.Tensor, teacher: LlamaForCausalLM, taught: torch.Tensor
) -> torch.Tensor:
    """Forward KL plus total variation, teacher to student (DistillSpec, arXiv 2310.08461): TV is what acceptance measures.

    hidden [B, T, H] of the student, taught [B, T, H'] of the teacher -> scalar.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    for states, wanted in _chunks(hidden, taught):
        log_q = F.log_softmax(student.lm_head(states).float(), -1)
        with torch.no_grad():
            log_p = F.log_softmax(teacher.lm_head(wanted).float(), -1)
            p = log_p.exp()
        total = total + (p * (log_p - log_q)).sum() + 0.5 * (p - log_q.exp()).abs().sum()
    return total / hidden.shape[:2].numel()


def early_exit_plan(recipe: Recipe, step: int) -> tuple[frozenset[int], int]:
    """The layers dropped at this step and the one extra exit that is trained (LayerSkip, arXiv 2404.16710)."""
    rng = np.random.default_rng((recipe.seed, step, 7))
    return dropped_layers(recipe.layers, MAX_LAYER_DROPOUT, rng), 1 + step % (recipe.layers - 1)


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(name: str, out: Path, compile_layers: bool = True, stop_after: int | None = None) -> Path:
    """Train one shipped model from nothing (or from its checkpoint) into `out/name`.

    Args:
        name: a name of recipe.RECIPES. A distilled model needs its teacher in `out` first.
        out: the folder of all shipped models.
        compile_layers: torch.compile every layer: about 1.5 times faster after a minute of compiling.
        stop_after: stop, with a checkpoint, after this many steps in all.

    Returns the model's folder.

    Raises ValueError for an unknown name or a missing teacher.
    """
    if name not in RECIPES:
        raise ValueError(f"name: {name!r} is not a shipped model; one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    teacher = _teacher(recipe, out)
    tokenizer = _tokenizer(recipe, out)
    stream = encode(tokenizer, corpus.training_files())
    model = build_model(recipe)
    if teacher is not None and teacher.config.hidden_size == recipe.hidden_size:
        model.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
        model.model.norm.load_state_dict(teacher.model.norm.state_dict())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for trained in (model, teacher):
        if trained is not None:
            trained.to(device)
            # compiled, eager attention's backward is faster on a CPU than sdpa's
            trained.set_attn_implementation("eager" if device.type == "cpu" else "sdpa")
    rules = optimizers(model, recipe)
    checkpoint = folder / "checkpoint.pt"
    first = checkpoints.resume(checkpoint, model, rules)
    if compile_layers:
        for layer in [*model.model.layers, *(teacher.model.layers if teacher else ())]:
            layer.compile()
    log = (folder / "training.jsonl").open("a")
    bar = tqdm(total=recipe.steps, initial=first, desc=f"train {name}", unit="step")
    for step, ids in enumerate(windows(stream, recipe)):
        if step < first:
            continue
        if stop_after is not None and step >= stop_after:
            break
        loss, losses = _step(model, teacher, ids.to(device), recipe, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for rule, peak in zip(rules, (recipe.matrix_lr, recipe.other_lr), strict=True):
            for group in rule.param_groups:
                group["lr"] = peak * recipe.rate(step)
            rule.step()
            rule.zero_grad()
        shown = {name: value.item() for name, value in losses.items()}
        bar.update()
        bar.set_postfix(shown, refresh=False)
        log.write(json.dumps({"step": step, **shown}) + "\n")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == stop_after:
            log.flush()
            checkpoints.save(checkpoint, model, rules, step + 1)
    else:
        _save_model(model, folder)
        checkpoint.unlink(missing_ok=True)
    bar.close()
    log.close()
    return folder


def _step(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, ids: torch.Tensor, recipe: Recipe, step: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One loss and what of it the log shows."""
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        if teacher is not None:
            with torch.no_grad():
                taught, _ = hidden_states(teacher, inputs)
            hidden, _ = hidden_states(model, inputs)
            loss = distillation_loss(model, hidden, teacher, taught)
            return loss, {"distillation": loss.detach()}
        skipped, exit_layer = early_exit_plan(recipe, step) if recipe.early_exit else (frozenset(), None)
        hidden, early = hidden_states(model, inputs, skipped, exit_layer)
        loss = text_loss(model, hidden, labels)
        shown = {"loss": loss.detach()}
        if early is not None and exit_layer is not None:
            half = max(1, len(ids) // 2)  # half the batch is enough for the exits
            exit_loss = text_loss(model, early[:half], labels[:half])
            loss = loss + EXIT_WEIGHT * exit_layer / recipe.layers * exit_loss
            shown["exit"] = exit_loss.detach()
    return loss, shown


def _teacher(recipe: Recipe, out: Path) -> LlamaForCausalLM | None:
    if recipe.teacher is None:
        return None
    if not (out / recipe.teacher / "model.safetensors").exists():
        raise ValueError(f"name: {recipe.name!r} is distilled from {recipe.teacher!r}; train that one first")
    model = LlamaForCausalLM.from_pretrained(out / recipe.teacher, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def _tokenizer(recipe: Recipe, out: Path) -> PreTrainedTokenizerFast:
    folder = out / recipe.name
    if recipe.teacher is not None:
        tokenizer = AutoTokenizer.from_pretrained(out / recipe.teacher)
        tokenizer.save_pretrained(folder)
        return tokenizer
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    return train_tokenizer(recipe.vocab_size, folder, recipe.pieces)


def _save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """bfloat16 on disk (half the bytes), float32 by config: on a CPU that is the exact and the faster type."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "model.safetensors").unlink()
    model.cpu().to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
