"""Grown targets in bfloat16: the shipped target's text and acceptance at the cost of 0.25 or 1 billion parameters.

The draft and the head are the shipped ones. Next to a target of this size they cost almost nothing, like a draft of a
thousandth of the target's size. The vocabulary of 4096 makes the target's output layer cheaper than a real one's. So the tables
show the cost of verifying several tokens on this machine, and the speedup for a given acceptance.
"""

from shared import SAMPLED, Race, Section

from assisted import Eagle
from assisted.lab.bench import Rules
from assisted.lengths import Fixed
from assisted.lengths.adaptive import Adaptive

OPTIONS = {"prompts": 8, "repeats": 1}
QUICK = {"only": "0.25 B, greedy", "drafts": ["suffix, Adaptive()"]}
SECTIONS = (Section("benchmarks/larger-targets", "grown"),)


def drafts(pair):
    """The draft and the head at several lengths, alone and combined with the suffix drafter."""
    from tools.grown_head import shipped_head

    head = shipped_head(pair.target)
    chain = Eagle(head, tree=False)
    return {
        "draft, Adaptive()": ("zoo:draft", Adaptive()),
        "draft, Fixed(5)": ("zoo:draft", Fixed(5)),
        "suffix and draft, Adaptive()": (["suffix", "zoo:draft"], Adaptive()),
        "suffix, Adaptive()": ("suffix", Adaptive()),
        "EAGLE chain, Adaptive()": (chain, Adaptive()),
        "EAGLE chain, Fixed(5)": (chain, Fixed(5)),
        "suffix and EAGLE chain, Adaptive()": (["suffix", chain], Adaptive()),
        "EAGLE tree of 7, Adaptive()": (Eagle(head, tree=True, nodes=7), Adaptive()),
    }


def of_batches(pair):
    found = {name: one for name, one in drafts(pair).items() if "tree" not in name and "Fixed" not in name}
    shorter = {name.replace("5", "2"): (one[0], Fixed(2)) for name, one in drafts(pair).items() if "Fixed" in name}
    return found | shorter


def races(args):
    sampled = Rules(128, **SAMPLED)
    small, large = ({"target": f"grown:{size}", "dtype": "bfloat16"} for size in ("0.25b", "1b"))
    return {
        "0.25 B, greedy, 48 tokens": Race(drafts, **small, peers=True),
        "0.25 B, temperature 0.8, top-p 0.95, 128 tokens": Race(drafts, **small, rules=sampled, share=0.5),
        "0.25 B, batch 8, greedy, 48 tokens": Race(of_batches, **small, rows=8, share=2),
        "1 B, greedy, 48 tokens": Race(drafts, **large, share=0.4),
        "1 B, temperature 0.8, top-p 0.95, 128 tokens": Race(drafts, **large, rules=sampled, share=0.4),
    }
