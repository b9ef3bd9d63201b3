"""The shipped hybrid and the shipped target with each kind of draft: tokens per pass, speed, bytes of states.

    python -m assisted train eagle --target zoo:hybrid --text zoo ... --out eagle3      # see docs/methods/mtp.md
    python -m assisted train mtp --target zoo:target --text zoo ... --out mtp           # as in the case `drafts`
    python benchmarks/run.py hybrid --eagle eagle3 --target-mtp mtp

Without `--eagle`, the hybrid has no EAGLE head, and without `--target-mtp`, the target has no MTP head. transformers' own
`generate(use_mtp=True)` takes part; where it cannot run, its error is below the table. All drafts have a fixed length, which
shows what they are worth, except in the last row of each target.
"""

from functools import partial

from shared import Section, about, heading, opened, paired, raced, titled

from assisted import MTP
from assisted.lab.bench import Method, Result, Rules, read
from assisted.lab.bench.table import markdown_table
from assisted.lengths.policies import Never

OPTIONS = {
    "prompts": 8,
    "repeats": 3,
    "new_tokens": 64,
    "no_compile": False,
    "draft_length": (3, "tokens of every draft"),
    "eagle": (None, "folder of an EAGLE-3 head for the hybrid"),
    "target_mtp": (None, "folder of an MTP head for zoo:target"),
}
SECTIONS = (Section("methods/mtp", "hybrid"),)
NO_DRAFT = "no draft"


def drafts_of(name, args):
    length, is_hybrid = args.draft_length, name == "zoo:hybrid"
    found = {NO_DRAFT: ("suffix", Never()), "suffix": ("suffix", length)}
    if not is_hybrid:
        found["draft model"] = "zoo:draft", length
    if is_hybrid or args.target_mtp:
        head = None if is_hybrid else args.target_mtp
        found["MTP, chains"] = MTP(head, tree=False), length
        found["MTP, longer chains"] = MTP(head, tree=False), 2 * length
        found["MTP, trees"] = MTP(head, tree=True), 2 * length
    if not is_hybrid or args.eagle:
        found["EAGLE-3, chains"] = f"eagle:{args.eagle}" if is_hybrid else "zoo:eagle3", length
    return found | {"8-bit copy": ("self:int8", length), "auto, default length": ("auto", None)}


def measure(args):
    races = {}
    for name in ("zoo:hybrid", "zoo:target"):
        pair = opened(name, "mtp" if name == "zoo:hybrid" else "zoo:draft")
        prompts = read(["code"], pair.tokenizer, args.prompts)
        generate = partial(pair.target.generate, use_mtp=True)
        theirs = Method("transformers, use_mtp", "transformers MTP", generate, {"use_mtp": True})
        for temperature in (0.0, 0.8):
            methods = [theirs, *paired(pair.target, pair.tokenizer, drafts_of(name, args))]
            rules = Rules(args.new_tokens, temperature=temperature)
            result = raced(args, pair, methods, prompts, rules, target=name)
            states = {one.name: one.model.report.state_bytes for one in methods if one.model is not None}
            races[f"{name}, temperature {temperature:g}"] = {"result": result.to_dict(), "states": states}
    its = about(pair, args)
    return {"about": its, "new_tokens": args.new_tokens, "draft_length": args.draft_length, "races": races}


def markdown(found):
    its = found["about"]
    head = heading(
        "hybrid",
        its,
        f"{its['prompts']} prompts of held-out code, {found['new_tokens']} new tokens, {its['dtype']}",
        f"Drafts have {found['draft_length']} tokens, longer chains twice as many, and trees twice that depth. Speed is "
        "relative to plain `generate`, and to this package's loop without a draft.",
    )
    tables = {}
    for title, race in found["races"].items():
        (measured,) = Result.from_dict(race["result"]).points
        alone = {row.name: row for row in measured.ran}[NO_DRAFT].milliseconds_per_token
        cells = [
            [
                row.name,
                f"{row.tokens_per_pass or 1:.2f}",
                f"{row.milliseconds_per_token:.2f}",
                f"{row.speedup.ratio:.2f}",
                f"{alone / row.milliseconds_per_token:.2f}",
                f"{states / 2**10:.0f}" if (states := race["states"].get(row.name)) is not None else "",
            ]
            for row in measured.ran
        ]
        columns = ("draft", "tokens per pass", "ms a token", "speedup", "over no draft", "KiB of states")
        failed = [f"{row.name} cannot run: {row.error}" for row in measured.rows if row.error is not None]
        tables[f"**`{title.replace(',', '`,', 1)}**"] = [
            *markdown_table(columns, cells),
            *([""] if failed else []),
            *failed,
        ]
    return titled(head, tables)
