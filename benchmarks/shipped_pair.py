"""The shipped pair against plain `generate` and transformers' assisted generation, interleaved in one run.

    python benchmarks/shipped_pair.py --out benchmarks/shipped_pair.json --docs README.md docs/benchmarks.md

Held-out code, the same prompts and number of new tokens for all (end tokens ignored), float32. Every contestant takes its
turn at every prompt; the ratio to plain is formed prompt by prompt, its interval by bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.comparison import held_out_prompts, repeated_share
from assisted.controller import Adaptive
from assisted.lengths import Confidence, Fixed, Length

PEER_SETTINGS = ((20, 0.4), (6, 0.4), (5, 0.0), (3, 0.0))


class Nothing(Length):
    def budget(self) -> int:
        return 0


@dataclass(frozen=True)
class Never:
    """This package's loop without drafts: what is gained by the way passes are run, not by drafting."""

    def start(self, earlier: Length | None = None) -> Length:
        return Nothing()


LENGTHS = (Adaptive(), Fixed(4), Confidence(0.4, 8))
WITH_COPIES = "suffix and draft, Adaptive()"
Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def peer(model: AssistedModelForCausalLM, setting: tuple[int, float], **kwargs: Any) -> Run:
    """transformers' assisted generation; it reads its setting from the draft's generation config."""

    def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        config = model.drafter.model.generation_config
        config.num_assistant_tokens, config.assistant_confidence_threshold = setting
        config.num_assistant_tokens_schedule = "constant"
        return model.target.generate(ids, attention_mask=mask, assistant_model=model.drafter.model, **kwargs)

    return run


def ours(model: AssistedModelForCausalLM, length: Any, **kwargs: Any) -> Run:
    return lambda ids, mask: model.generate(ids, attention_mask=mask, draft_length=length, **kwargs)


def race(
    runs: dict[str, Run], inputs: list[tuple[torch.Tensor, torch.Tensor]], repeats: int, what: str
) -> dict[str, Any]:
    """Median seconds of every contestant at every prompt, and what each wrote."""
    taken: dict[str, list[list[float]]] = {name: [[] for _ in inputs] for name in runs}
    wrote: dict[str, list[torch.Tensor]] = {name: [] for name in runs}
    names = list(runs)
    for ids, mask in inputs[:2]:
        for name in names:
            runs[name](ids, mask)
    for repeat in tqdm(range(repeats), desc=what, unit="round"):
        for number, (ids, mask) in enumerate(inputs):
            for name in names:
                started = time.perf_counter()
                out = runs[name](ids, mask)
                taken[name][number].append(time.perf_counter() - started)
                if repeat == 0:
                    wrote[name].append(out[:, ids.shape[1] :])
            names = names[1:] + names[:1]
    return {"taken": {n: [statistics.median(t) for t in times] for n, times in taken.items()}, "wrote": wrote}


def interval(plain: list[float], other: list[float]) -> dict[str, float]:
    """Ratio of summed seconds, with a 95% bootstrap interval over prompts."""
    rng = random.Random(0)
    ratios = []
    for _ in range(2000):
        chosen = [rng.randrange(len(plain)) for _ in plain]
        ratios.append(sum(plain[i] for i in chosen) / sum(other[i] for i in chosen))
    ratios.sort()
    return {"ratio": sum(plain) / sum(other), "low": ratios[50], "high": ratios[1949]}


def table(model: AssistedModelForCausalLM, result: dict[str, Any], greedy: bool) -> list[dict[str, Any]]:
    plain = result["taken"]["plain"]
    rows = []
    for name, taken in result["taken"].items():
        wrote = result["wrote"][name]
        completions = [row.tolist() for batch in wrote for row in batch]
        same = sum(torch.equal(a, b) for a, b in zip(wrote, result["wrote"]["plain"], strict=True))
        rows.append(
            {
                "name": name,
                **interval(plain, taken),
                "same": f"{same}/{len(wrote)}" if greedy else None,
                "repeated_4grams": repeated_share(completions),
                "ms_per_token": 1e3 * sum(taken) / sum(batch.shape[1] for batch in wrote),
            }
        )
    return rows


def counts(
    model: AssistedModelForCausalLM, run: Run, inputs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Any]:
    """What ours did over all prompts, once."""
    model.reset_totals()
    for ids, mask in inputs:
        run(ids, mask)
    t = model.totals
    return {
        "tokens_per_pass": t.tokens_per_pass,
        "acceptance_rate": t.acceptance_rate,
        "acceptance_by_position": t.acceptance_by_position,
        "draft_share": t.draft_seconds / t.seconds,
        "verify_share": t.verify_seconds / t.seconds,
    }


def machine() -> dict[str, Any]:
    """What the figures were measured with."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }


def measure(prompts: int, repeats: int, peers: bool) -> dict[str, Any]:
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", dtype=torch.float32)
    model.target.generation_config.eos_token_id = None  # everybody writes the same number of tokens
    model.drafter.model.generation_config.eos_token_id = None
    both = AssistedModelForCausalLM.from_models(
        model.target, draft=["suffix", DraftModel(model.drafter.model)], tokenizer=model.tokenizer
    )
    texts = list(islice(held_out_prompts(model.tokenizer), 2 * prompts))
    single = [(p.ids, torch.ones_like(p.ids)) for p in texts[:prompts]]
    batches = []
    for start in range(0, len(texts) - 7, 8):
        batch = model.tokenizer([p.text for p in texts[start : start + 8]], return_tensors="pt", padding=True)
        batches.append((batch.input_ids, batch.attention_mask))
    greedy = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 1}
    sampled = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 0,
        "max_new_tokens": 128,
        "pad_token_id": 1,
    }
    found: dict[str, Any] = {
        **machine(),
        "prompts": len(single),
        "repeats": repeats,
    }
    for title, kwargs, inputs in (
        ("greedy, 48 tokens", greedy, single),
        ("temperature 0.8, top-p 0.95, 128 tokens", sampled, single[: max(4, prompts // 2)]),
        ("batch 8, greedy, 48 tokens", greedy, batches),
    ):
        runs: dict[str, Run] = {
            "plain": lambda ids, mask, kw=kwargs: model.target.generate(ids, attention_mask=mask, **kw)
        }
        if peers and inputs is not batches:  # transformers' assisted generation takes no batches
            runs |= {f"transformers assisted {n}, {t}": peer(model, (n, t), **kwargs) for n, t in PEER_SETTINGS}
        mine = {"no draft, this loop": ours(model, Never(), **kwargs)}
        mine |= {f"draft, {_short(length)}": ours(model, length, **kwargs) for length in LENGTHS}
        mine[WITH_COPIES] = ours(both, None, **kwargs)
        result = race(runs | mine, inputs, repeats, title)
        rows = table(model, result, kwargs is greedy)
        for row in rows:
            if row["name"] in mine:
                row |= counts(both if row["name"] == WITH_COPIES else model, mine[row["name"]], inputs)
        found[title] = rows
    return found


def _short(length: Any) -> str:
    return "Adaptive()" if isinstance(length, Adaptive) else str(length)


def show(found: dict[str, Any]) -> None:
    for title, rows in found.items():
        if not isinstance(rows, list):
            continue
        print(f"\n{title}")
        for row in rows:
            per_pass = f"{row['tokens_per_pass']:.2f} tokens/pass" if "tokens_per_pass" in row else ""
            print(
                f"  {row['name']:<40} {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
                f"  {row['ms_per_token']:6.2f} ms/token"
                f"  4-grams {row['repeated_4grams']:.1%}  same {row['same'] or '-'}  {per_pass}"
            )


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in README and docs."""
    lines = [
        f"`python benchmarks/shipped_pair.py`: {found['prompts']} held-out functions cut in the middle, float32, "
        f"CPU threads: {found['threads']}, torch {found['torch']}, transformers {found['transformers']}, all contestants "
        "interleaved in one run. Ratio: seconds of plain `generate` over seconds, with a 95% bootstrap interval over prompts. "
        "Tokens per pass include the target's own token. Repeated 4-grams: a small model loops, and loops flatter every "
        "drafter.",
    ]
    for title, rows in found.items():
        if not isinstance(rows, list):
            continue
        lines += ["", f"**{title[0].upper()}{title[1:]}**", ""]
        lines += [
            "| | times plain | ms per token | tokens per pass | same tokens | repeated 4-grams |",
            "|---|---|---|---|---|---|",
        ]
        for row in _shown(rows):
            per_pass = f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else ""
            lines.append(
                f"| {row['name']} | {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}] | {row['ms_per_token']:.2f} "
                f"| {per_pass} | {row['same'] or ''} | {row['repeated_4grams']:.0%} |"
            )
    return "\n".join(lines)


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain, transformers at its fastest setting, and ours at all of them."""
    peers = [r for r in rows if r["name"].startswith("transformers")]
    ours = [r for r in rows if "tokens_per_pass" in r]
    return [rows[0], *sorted(peers, key=lambda r: r["ratio"])[-1:], *ours]


def write_docs(paths: list[Path], text: str) -> None:
    """Replace what stands between the two markers of each file."""
    for path in paths:
        head, begin, rest = path.read_text().partition("<!-- measured:begin -->")
        _, end, tail = rest.partition("<!-- measured:end -->")
        if not end:
            raise ValueError(f"{path} has no <!-- measured:begin --> and <!-- measured:end -->")
        path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers' assisted generation out")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose measured section is rewritten")
    parser.add_argument("--read", type=Path, help="measure nothing, take the figures from this JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = json.loads(args.read.read_text()) if args.read else measure(args.prompts, args.repeats, not args.no_peers)
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    write_docs(args.docs, markdown(found))


if __name__ == "__main__":
    main()
