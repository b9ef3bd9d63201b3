"""The model card of the shipped models, measured on held-out code: `python -m tools.shipped card`.

Every figure in the card is computed here, so that retrained models get a correct card from one command.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted.lab.bench import held_out_prompts, repeated_share
from assisted.methods import MTP, DFlash, Eagle, Medusa
from assisted.modeling import AssistedModelForCausalLM
from assisted.zoo import HEADS, corpus

from .shapes import RECIPES

__all__ = ["Drafting", "Head", "measure", "write"]

WINDOW = 512  # tokens of context for the bits per byte
WINDOWS = 60
PROMPTS, NEW_TOKENS = 40, 48
CHAIN = 4  # tokens of a head's chain, as many as there are Medusa heads
TREE_NODES, TREE_DEPTH = 32, 6
KINDS: dict[str, tuple[Any, dict[str, int]]] = {
    "eagle": (Eagle, {"top_k": 6}),
    "medusa": (Medusa, {}),
    "dflash": (DFlash, {}),
}
SHOWN = 10
SHOWN_TOKENS = 64


@dataclass(frozen=True)
class Drafting:
    """The draft with the target, batch 1, float32.

    Args:
        draft_length: tokens drafted per round.
        temperature: 0 is greedy.
        tokens_per_pass: new tokens per forward pass of the target, including its own token.
        acceptance_by_position: the acceptance rates of the first, second, ... drafted token.
        repeated_4grams: share of the generated 4-grams that occurred before in the same completion.
    """

    draft_length: int
    temperature: float
    tokens_per_pass: float
    acceptance_by_position: tuple[float, ...]
    repeated_4grams: float


@dataclass(frozen=True)
class Head:
    """Trained heads for the target.

    Args:
        name: of the folder.
        parameters: their own, without those of the target that they use.
        bytes: of the folder.
        tokens: number of tokens they were trained on.
        command: the command that trained them.
        chain: with greedy chains.
        trees: with token trees, greedy and sampled.
    """

    name: str
    parameters: int
    bytes: int
    tokens: int
    command: str
    chain: Drafting
    trees: tuple[Drafting, ...]


@torch.no_grad()
def bits_per_byte(folder: Path) -> float:
    """Cross-entropy of a model over seeded windows of held-out files, per byte of their text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    files = corpus.held_out_files()
    random.Random(1).shuffle(files)
    bits = bytes_read = 0.0
    for path in tqdm(files[:WINDOWS], desc=f"bits per byte of {folder.name}", unit="file"):
        ids = tokenizer(corpus.read(path), return_tensors="pt").input_ids[:, :WINDOW]
        ids = F.pad(ids, (1, 0), value=tokenizer.eos_token_id)  # in training, files came after an end token
        logits = model(ids[:, :-1]).logits[0]
        bits += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item() / math.log(2)
        bytes_read += len(tokenizer.decode(ids[0, 1:]).encode())
    return bits / bytes_read


def drafting(
    model: AssistedModelForCausalLM, draft_length: int, temperature: float, prompts: int = PROMPTS, top_p: float = 0.95
) -> Drafting:
    """Tokens per forward pass over held-out functions, with 48 new tokens each. top_p: above temperature 0."""
    model.reset_totals()
    torch.manual_seed(0)
    completions = []
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
    work = list(islice(held_out_prompts(model.tokenizer), prompts))
    for prompt in tqdm(work, desc=f"drafting {draft_length} at temperature {temperature}", unit="prompt"):
        out = model.generate(prompt.ids, max_new_tokens=NEW_TOKENS, draft_length=draft_length, **sampling)
        completions.append(out[0, prompt.ids.shape[1] :].tolist())
    totals = model.totals
    shares = tuple(round(share, 3) for share in totals.acceptance_by_position)
    return Drafting(draft_length, temperature, totals.tokens_per_pass, shares, repeated_share(completions))


def head(models: Path, name: str) -> Head:
    """Trained heads with the target, and how they were trained, from the training.json in their folder."""
    folder = models / name
    about = json.loads((folder / "training.json").read_text())
    kind, options = KINDS[about["method"]]

    def load(tree: bool, **options: Any) -> AssistedModelForCausalLM:
        spec = kind(str(folder), tree=tree, **options)
        return AssistedModelForCausalLM.from_pretrained(models / "target", draft=spec, dtype=torch.float32)

    chains, trees = load(False), load(True, nodes=TREE_NODES, **options)
    return Head(
        name,
        parameters=sum(p.numel() for module in chains.drafter.modules for p in module.parameters()),
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
        tokens=about["steps"] * about["batch"] * about["context"],
        command=about["command"],
        chain=drafting(chains, CHAIN, 0.0),
        trees=tuple(drafting(trees, TREE_DEPTH, temperature) for temperature in (0.0, 0.8)),
    )


def mtp(folder: Path) -> dict[str, Any]:
    """The hybrid's MTP head: how it was trained, and chains and trees, greedy and sampled."""
    about = json.loads((folder / "training.json").read_text())
    found: dict[str, Any] = {"command": about["command"], "tokens": about["steps"] * about["batch"] * about["context"]}
    for tree in (False, True):
        pair = AssistedModelForCausalLM.from_pretrained(folder, draft=MTP(tree=tree), dtype=torch.float32)
        found["parameters"] = sum(p.numel() for module in pair.drafter.modules for p in module.parameters())
        depth = TREE_DEPTH if tree else CHAIN
        found["trees" if tree else "chains"] = [
            asdict(drafting(pair, depth, temperature)) for temperature in (0.0, 0.8)
        ]
    return found


def measure(models: Path) -> dict[str, Any]:
    """Everything that the card states, ready for json. models: the folder of all shipped models."""
    measured = []
    for name in RECIPES:
        folder = models / name
        parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()  # shared ones are counted once
        measured.append({"name": name, "parameters": parameters, "bits_per_byte": bits_per_byte(folder)})
    target = models / "target"
    pair = AssistedModelForCausalLM.from_pretrained(target, draft=str(models / "draft"), dtype=torch.float32)
    figures = [drafting(pair, length, temperature) for length, temperature in ((4, 0.0), (2, 0.0), (8, 0.0), (4, 0.8))]
    return {
        "models": measured,
        "drafting": [asdict(d) for d in figures],
        "heads": [asdict(head(models, name)) for name in HEADS if (models / name).is_dir()],
        "mtp": mtp(models / "hybrid"),
        "completions": _completions(pair),
    }


def write(models: Path) -> Path:
    """Measure, and write `card.json` and `README.md` into the folder of the models. Returns the card's path."""
    figures = measure(models)
    (models / "card.json").write_text(json.dumps(figures, indent=1) + "\n")
    card = models / "README.md"
    card.write_text(_card(figures))
    return card


def _completions(pair: AssistedModelForCausalLM) -> list[dict[str, str]]:
    tokenizer: Any = pair.tokenizer
    shown = []
    for prompt in islice(held_out_prompts(pair.tokenizer), SHOWN):
        out = pair.generate(prompt.ids, max_new_tokens=SHOWN_TOKENS, do_sample=False)
        text = tokenizer.decode(out[0, prompt.ids.shape[1] :], skip_special_tokens=True)
        shown.append({"source": prompt.source, "prompt": prompt.text, "completion": text})
    return shown


def _card(figures: dict[str, Any]) -> str:
    lines = [
        "---",
        "license: apache-2.0",
        "library_name: transformers",
        "tags: [code, speculative-decoding]",
        "---",
        "",
        "# The shipped models",
        "",
        "Small models that write Python, three of Llama's architecture and one of Qwen3.5's, and heads for two of them. This",
        "project trained them from random weights, so that targets and drafts can be tried without a download. They are for",
        "demonstration, teaching and tests. They complete the form of code well and its meaning poorly; do not use what they",
        "write.",
        "",
        "**Data.** The `.py` files of CPython 3.11's standard library with its tests, without duplicates and tables (PSF",
        "licence). The sources of sympy and networkx are held out: no model was trained on them, and every figure is measured",
        "on them.",
        "",
        "| model | layers x hidden | vocabulary | parameters | steps | trained on | held-out bits per byte |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in figures["models"]:
        recipe = RECIPES[model["name"]]
        tokens = sum(phase.steps * phase.batch * phase.context for phase in recipe.phases) / 1e6
        how = f"distilled from `{recipe.teacher}`" if recipe.teacher else "text"
        how += ", layer dropout and early-exit losses" if recipe.exits else ""
        lines.append(
            f"| `zoo:{model['name']}` | {recipe.shape.layers} x {recipe.shape.hidden_size} | {recipe.vocab_size} "
            f"| {model['parameters'] / 1e6:.1f} M | {recipe.plan.steps} ({tokens:.1f} M tokens) | {how} "
            f"| {model['bits_per_byte']:.2f} |"
        )
    lines += [
        "",
        "Muon trained the matrices and AdamW the rest, in bfloat16 autocast. In a clone, `python -m tools.shipped train NAME",
        "--out DIR` trains such a model again. Weights are stored as bfloat16 and computed in float32.",
        "",
        f"**Drafting.** `zoo:draft` for `zoo:target`, batch 1, float32, {PROMPTS} held-out functions cut in the middle,",
        f"{NEW_TOKENS} new tokens each. Tokens per forward pass of the target include its own token. Drafts by",
        "`zoo:draft-other-tokenizer` are translated between the vocabularies; its figures are in",
        "docs/methods/other-tokenizer.md.",
        "",
        "| draft length | temperature | tokens per forward pass | accepted at position 1, 2, ... | repeated 4-grams |",
        "|---|---|---|---|---|",
    ]
    for row in figures["drafting"]:
        shares = ", ".join(f"{share:.0%}" for share in row["acceptance_by_position"])
        lines.append(
            f"| {row['draft_length']} | {row['temperature']} | {row['tokens_per_pass']:.2f} | {shares} "
            f"| {row['repeated_4grams']:.1%} |"
        )
    lines += _heads_of_card(figures["heads"]) if figures["heads"] else []
    lines += _mtp_of_card(figures["mtp"])
    lines += ["", f"**Ten completions**, greedy, {SHOWN_TOKENS} tokens; the model continues after the line.", ""]
    for shown in figures["completions"]:
        lines += [f"`{shown['source']}`", "", "```text", shown["prompt"], "-" * 60 + shown["completion"], "```", ""]
    return "\n".join(lines)


def _mtp_of_card(figures: dict[str, Any]) -> list[str]:
    chains, trees = figures["chains"], figures["trees"]
    shares = ", ".join(f"{share:.0%}" for share in chains[0]["acceptance_by_position"])
    per_pass = " | ".join(f"{row['tokens_per_pass']:.2f}" for row in (*chains, *trees))
    return [
        "",
        "**The hybrid** has three layers with a gated delta rule for each layer with full attention, as Qwen3.5 has. Its",
        f"checkpoint has an MTP head of {figures['parameters'] / 1e6:.2f} M parameters, which read",
        f"{figures['tokens'] / 1e6:.1f} M tokens in training. Measured in the same way, tokens per forward pass of the hybrid:",
        "",
        "| accepted at position 1, 2, ... | chain | chain, temperature 0.8 | tree | tree, temperature 0.8 |",
        "|---|---|---|---|---|",
        f"| {shares} | {per_pass} |",
        "",
        "```bash",
        figures["command"],
        "```",
    ]


def _heads_of_card(heads: list[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "**Heads** for `zoo:target`, measured in the same way, with greedy chains of 4 tokens and token trees of "
        f"{TREE_NODES} nodes,",
        f"at most {TREE_DEPTH} deep. They are stored as bfloat16 and computed in the target's dtype.",
        "",
        "| heads | parameters | size | trained on | accepted at position 1, 2, ... | chain | tree | tree, temperature 0.8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in heads:
        shares = ", ".join(f"{share:.0%}" for share in row["chain"]["acceptance_by_position"])
        per_pass = [f"{drafting['tokens_per_pass']:.2f}" for drafting in (row["chain"], *row["trees"])]
        lines.append(
            f"| `zoo:{row['name']}` | {row['parameters'] / 1e6:.2f} M | {row['bytes'] / 2**20:.1f} MiB "
            f"| {row['tokens'] / 1e6:.1f} M tokens | {shares} | {' | '.join(per_pass)} |"
        )
    lines += [
        "",
        "The last three columns are tokens per forward pass of the target. These commands trained the heads:",
        "",
        "```bash",
    ]
    return [*lines, *(row["command"] for row in heads), "```"]
