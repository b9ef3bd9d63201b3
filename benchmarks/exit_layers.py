"""Early exit and layer skipping on one model, by the protocol of `assisted bench`: acceptance and speedup by exit layer.

    python benchmarks/exit_layers.py --out benchmarks/exit_layers.json

Held-out functions cut in the middle, float32, temperature 0, drafts of a fixed length.
"""

from __future__ import annotations

from typing import Any

import torch
from tables import arguments, figures, measured_with, publish, raced, table

from assisted import AssistedModelForCausalLM
from assisted.bench import Result, Rules, assisted, read

COLUMNS = ("first token accepted", "accepted", "tokens per pass", "speedup", "same tokens")


def measure(args: Any) -> dict[str, Any]:
    """All exit layers, the automatic choice and layer skipping."""
    pair = AssistedModelForCausalLM.from_pretrained(args.model, draft="suffix", dtype=torch.float32)
    count = pair.target.config.get_text_config(decoder=True).num_hidden_layers
    names = [f"early-exit:{layer}" for layer in args.layers or range(1, count)] + ["early-exit", "layer-skip"]
    own = list(assisted(pair.target, {name: name for name in names}, pair.tokenizer, args.draft_length))
    prompts = read(["code"], pair.tokenizer, args.prompts)
    result = raced(args, pair, own, prompts, Rules(args.new_tokens), target=args.model)
    chosen = {
        one.name: one.model.drafter.exit_layer for one in own if one.model and hasattr(one.model.drafter, "exit_layer")
    }
    about = result.machine | {"model": args.model, "layers": count}
    return {"about": about, "draft_length": args.draft_length, "chosen": chosen, "result": result.to_dict()}


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    (measured,) = Result.from_dict(found["result"]).points
    lines = [
        f"{measured_with(about, 'python benchmarks/exit_layers.py')} {about['model']}, {about['layers']} layers, drafts of "
        f"{found['draft_length']} tokens.",
        "",
        *table(measured, COLUMNS),
    ]
    if "assisted early-exit" in found["chosen"]:
        lines += ["", f"The automatic choice is layer {found['chosen']['assisted early-exit']}."]
    return "\n".join(lines)


def main() -> None:
    numbers = {"--draft-length": (4, "tokens of every draft"), "--new-tokens": (48, "of each prompt")}
    parser = arguments(__doc__, numbers=numbers)
    parser.add_argument(
        "--model", default="zoo:target", help="a folder, a Hub id or a zoo: name (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, nargs="*", help="exit layers to try (default: all)")
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs)


if __name__ == "__main__":
    main()
