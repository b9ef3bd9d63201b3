"""Two versions of this package on the shipped pair, in one run: whole calls alternate between two processes.

    git worktree add ../before COMMIT
    python benchmarks/run.py versions --before ../before --threads 1

Each process imports the package of its folder, and nothing else differs. The case asks both for the same call, one after the
other, in changing order. The result is the seconds of the first version over those of the second, the median over prompts of
the ratio at each: above 1 the second one is faster. Texts and drafts of the two are compared as well.
"""

from pathlib import Path
from statistics import median

from shared import FOLDER, Worker, about, below, heading

ROOT = FOLDER.parent
CASES = {
    "suffix, adaptive": ("suffix", "adaptive", "float32", 1),
    "draft model, 4 tokens": ("zoo:draft", 4, "float32", 1),
    "draft model, adaptive": ("zoo:draft", "adaptive", "float32", 1),
    "EAGLE-3 trees, adaptive": ("zoo:eagle3", "adaptive", "float32", 1),
    "Medusa trees, adaptive": ("zoo:medusa", "adaptive", "float32", 1),
    "draft model, 4 tokens, batch of 4": ("zoo:draft", 4, "float32", 4),
    "suffix, adaptive, bfloat16": ("suffix", "adaptive", "bfloat16", 1),
}
"""By name: draft, draft length, dtype, rows."""
OPTIONS = {
    "prompts": 6,
    "repeats": 3,
    "new_tokens": 64,
    "before": (str(ROOT), "folder of the older version"),
    "after": (str(ROOT), "folder of the newer one"),
    "cases": (list(CASES), "that are measured"),
}
QUICK = {"cases": ["suffix, adaptive"]}
SECTIONS = ()


def measure(args):
    folders = [Path(folder).resolve() for folder in (args.before, args.after)]
    workers = [
        Worker("peers", "shipped_pair", threads=args.threads or 1, cwd=folder, PYTHONPATH=str(folder))
        for folder in folders
    ]
    texts = [path.read_text() for path in sorted((ROOT / "assisted/methods/shared").glob("*.py"))[1 : 1 + args.prompts]]
    rows = {}
    for name in args.cases:
        ratios, same, drafted = [], 0, [0, 0]
        for text in texts:
            found = [[], []]
            for repeat in range(args.repeats + 1):
                for number in (0, 1) if repeat % 2 else (1, 0):
                    found[number].append(workers[number].ask(*CASES[name], text, args.new_tokens))
            # the first call of each warms up
            one, two = (median(seconds for seconds, *_ in calls[1:]) for calls in found)
            ratios.append(one / two)
            same += found[0][-1][1] == found[1][-1][1]
            drafted = [sum(call[2] for call in calls) + have for calls, have in zip(found, drafted, strict=True)]
        spread = {"speedup": median(ratios), "from": min(ratios), "to": max(ratios)}
        rows[name] = {key: round(ratio, 3) for key, ratio in spread.items()}
        rows[name] |= {"same_texts": f"{same}/{len(texts)}", "drafted": drafted}
    for worker in workers:
        worker.end()
    return {"about": about(args=args), "rows": rows}


def markdown(found):
    its = found["about"]
    head = heading("versions", its, f"{its['prompts']} prompts, {its['new_tokens']} new tokens")
    cells = [
        [name, f"{row['speedup']:.3f} [{row['from']:.3f}, {row['to']:.3f}]", row["same_texts"], row["drafted"]]
        for name, row in found["rows"].items()
    ]
    return below(head, ["", "times as fast", "same texts", "drafted tokens"], cells)
