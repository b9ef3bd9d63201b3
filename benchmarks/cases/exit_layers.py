"""Early exit and layer skipping on one model: acceptance and speedup by exit layer, with drafts of a fixed length."""

from shared import Race, opened

OPTIONS = {
    "model": "zoo:target",
    "draft_length": (4, "tokens of every draft"),
    "layers": ([0], "exit layers to try; 0 for all"),
}
QUICK = {"layers": [2]}
SECTIONS = ()
TABLE = {"columns": ("first token accepted", "accepted", "tokens per pass", "speedup", "same tokens")}


def races(args):
    count = opened(args.model).target.config.get_text_config(decoder=True).num_hidden_layers
    layers = range(1, count) if args.layers == [0] else args.layers
    names = [*(f"early-exit:{layer}" for layer in layers), "early-exit", "layer-skip"]
    title = f"{args.model}, {count} layers, drafts of {args.draft_length} tokens"
    drafts = {name: (name, args.draft_length) for name in names}
    return {title: Race(drafts, target=args.model, draft="suffix")}
