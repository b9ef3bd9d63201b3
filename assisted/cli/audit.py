"""`assisted audit`: the arguments, and where the report goes. The checking is done elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import add_loading, loading, option, print_or_write, target_and_tokenizer


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `audit` into the parser. command: makes a parser with a function to run and a text."""
    text = "check whether a model with drafts, or a server, is lossless: whether it writes what the model alone would write"
    audit = command("audit", _audit, text, page="audit", file="all results")
    option(audit, "subject", "address of an OpenAI-compatible server, up to /v1; or a Hub id, folder or zoo: name")
    option(audit, "--draft", "draft of a model; a server has its own (default: suffix)", metavar="DRAFT")
    same = "model with the same weights, run by transformers; required for a server (default: the target)"
    option(audit, "--reference", same, metavar="MODEL")
    option(audit, "--name", "name of the model at the server (default: its first model)", metavar="NAME")
    sets = "code, edits, json, prose, chat, or a question.jsonl; several are taken together"
    option(audit, "--prompts", sets, ["code"], nargs="+", type=str, metavar="SET")
    option(audit, "--count", "prompts per category", 8)
    option(audit, "--max-new-tokens", "new tokens per text", 48)
    option(audit, "--samples", "sampled texts per prompt", 8)
    option(audit, "--temperature", "temperature of sampled texts", 1.0)
    for name, what in (
        ("gap", "logit difference of a near-tie"),
        ("logprob", "allowed difference of log probabilities"),
    ):
        text = f"largest {what} (default: 0.25 in half precision, else 0.001)"
        option(audit, f"--{name}", text, type=float, metavar="X")
    option(audit, "--html", "write the report as a page", metavar="FILE")
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
    prompts = [prompt.ids[0].tolist() for prompt in read(args.prompts, tokenizer, args.count)]
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
