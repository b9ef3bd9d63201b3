"""`assisted audit`: the arguments, and where the report goes. The checking is done elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import DEFAULT, add_loading, loading, print_or_write, target_and_tokenizer


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `audit` into the parser. command: makes a parser with a function to run and a text."""
    text = "check whether a model with drafts, or a server, is lossless: whether it writes what the model alone would write"
    audit = command("audit", _audit, text, page="audit", file="all results")
    audit.add_argument(
        "subject", help="address of an OpenAI-compatible server, up to /v1; or a Hub id, folder or zoo: name"
    )
    audit.add_argument("--draft", metavar="DRAFT", help="draft of a model; a server has its own (default: suffix)")
    audit.add_argument(
        "--reference",
        metavar="MODEL",
        help="model with the same weights, run by transformers; required for a server (default: the target)",
    )
    audit.add_argument("--name", metavar="NAME", help="name of the model at the server (default: its first model)")
    audit.add_argument("--prompts", default="code", help="code, prose, json, chat, or a file of questions" + DEFAULT)
    audit.add_argument("--count", type=int, default=8, help="prompts per category" + DEFAULT)
    audit.add_argument("--max-new-tokens", type=int, default=48, help="new tokens per text" + DEFAULT)
    audit.add_argument("--samples", type=int, default=8, help="sampled texts per prompt" + DEFAULT)
    audit.add_argument("--temperature", type=float, default=1.0, help="temperature of sampled texts" + DEFAULT)
    audit.add_argument(
        "--gap",
        type=float,
        metavar="X",
        help="largest logit difference of a near-tie (default: 0.25 in half precision, else 0.001)",
    )
    audit.add_argument(
        "--logprob",
        type=float,
        metavar="X",
        help="largest allowed difference of log probabilities (default: 0.25 in half precision, else 0.001)",
    )
    audit.add_argument("--html", metavar="FILE", help="write the report as a page")
    add_loading(audit, "adaptive")


def _audit(args: argparse.Namespace) -> None:
    from ..lab.audit import Model, Server, Settings, audit
    from ..lab.audit.report import html, told
    from ..lab.bench.clock import Bars
    from ..lab.bench.prompts import read
    from ..modeling import AssistedModelForCausalLM

    options = loading(args)
    subject: Any
    if args.subject.startswith(("http://", "https://")):
        if args.reference is None:
            raise ValueError("reference: a server needs one; give the model with the same weights as --reference")
        if args.draft is not None:
            raise ValueError("draft: a server has its own; leave --draft out")
        plain, tokenizer = target_and_tokenizer(args.reference, **_placed(options))
        subject, name = Server(args.subject, tokenizer, args.name), args.reference
    else:
        pair = AssistedModelForCausalLM.from_pretrained(args.subject, draft=args.draft, **options)
        plain, tokenizer, name = pair.target, pair.tokenizer, f"{args.subject} alone"
        if args.reference is not None:
            plain, tokenizer = target_and_tokenizer(args.reference, **_placed(options))
            name = args.reference
        subject = Model(pair, tokenizer, name=f"{args.subject} with {args.draft or 'its default draft'}")
    plain = getattr(plain, "target", plain)
    prompts = [prompt.ids[0].tolist() for prompt in read([args.prompts], tokenizer, args.count)]
    settings = Settings(args.max_new_tokens, args.samples, args.temperature, args.gap, args.logprob)
    with Bars() as bars:
        found = audit(subject, plain, tokenizer, prompts, settings, name, progress=bars)
    if args.html is not None:
        Path(args.html).write_text(html(found), encoding="utf-8")
    text = told(found)
    print_or_write(args.json, {**found.to_dict(), "told": text}, text)
    if not found.is_lossless:
        raise ValueError(f"{args.subject}: not lossless, see the report")


def _placed(options: dict[str, Any]) -> dict[str, Any]:
    """Of the options of a pair, those of a model."""
    return {"dtype": "auto"} | {name: options[name] for name in ("dtype", "device_map") if name in options}
