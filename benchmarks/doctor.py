"""Write the output of `assisted doctor` for the shipped pair into its page.

python benchmarks/doctor.py --docs docs/howto/doctor.md
"""

from __future__ import annotations

import torch
from tables import arguments, publish

from assisted.bench.bars import Bars
from assisted.bench.grown import load_target
from assisted.doctor.diagnosis import Settings
from assisted.doctor.examine import examine
from assisted.doctor.findings import told


def main() -> None:
    parser = arguments(__doc__, ("--threads", "--docs"), threads=1)
    parser.add_argument("--target", default="zoo:target", help="(default: %(default)s)")
    parser.add_argument("--draft", nargs="+", default=["zoo:draft", "suffix"], help="(default: zoo:draft suffix)")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=90.0, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, tokenizer = load_target(args.target, getattr(torch, args.dtype))
    drafts = {name: name for name in args.draft}
    with Bars() as bars:
        found = examine(
            target, drafts, tokenizer, None, Settings(seconds=args.seconds), name=args.target, progress=bars
        )
    typed = " ".join(f"--draft {name}" for name in args.draft)
    publish(f"`assisted doctor {args.target} {typed}`:\n\n```text\n{told(found)}\n```", args.docs)


if __name__ == "__main__":
    main()
