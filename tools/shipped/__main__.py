"""`python -m tools.shipped train NAME --out DIR`, `join --target DIR --head DIR`, and `card --models DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .card import write
from .shapes import RECIPES
from .train import join, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.shipped", description="Make the shipped models again.")
    actions = parser.add_subparsers(dest="action", required=True)
    trains = actions.add_parser("train", help="train a shipped model again, from scratch or from its checkpoint")
    trains.add_argument("name", choices=RECIPES, help="draft needs the target in the same folder")
    trains.add_argument("--out", type=Path, required=True, help="the folder of all models, each in a subfolder")
    trains.add_argument("--stop-after", type=int, metavar="N", help="stop with a checkpoint after N steps in all")
    trains.add_argument(
        "--no-compile", action="store_true", help="do not compile the layers: no compiler needed, slower"
    )
    joins = actions.add_parser("join", help="put an MTP head from `assisted train mtp` into its target's checkpoint")
    joins.add_argument("--target", type=Path, required=True, help="the target's folder, which is changed")
    joins.add_argument("--head", type=Path, required=True, help="the head's folder")
    card = actions.add_parser("card", help="measure a folder of models on held-out code and write its model card")
    card.add_argument("--models", type=Path, required=True, help="the folder that train wrote")
    args = parser.parse_args()
    if args.action == "card":
        print(write(args.models))
    elif args.action == "join":
        join(args.target, args.head)
    else:
        print(train(args.name, args.out, compile_layers=not args.no_compile, stop_after=args.stop_after))


if __name__ == "__main__":
    main()
