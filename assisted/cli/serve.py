"""`assisted serve`: the arguments, and a line for each request. Requests are answered in `serving`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import add_loading, add_target, loading, option, print_json, require_tokenizer


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `serve` into the parser. command: makes a parser with a function to run and a text."""
    text = "answer requests with OpenAI's protocol, a few at a time, with a report on the drafts of each"
    serve = command("serve", _serve, text, page="serve")
    add_target(serve, serve, "Hub id, folder, saved pair, or zoo: name")
    choose = "may be given several times: requests choose, and the first is the default"
    option(serve, "--draft", f"{choose} (default: the pair's own, else suffix)", action="append", metavar="DRAFT")
    option(serve, "--name", "of the model, for requests (default: that of its folder)")
    option(serve, "--host", "address to listen at", "127.0.0.1")
    option(serve, "--port", "0 takes any free one", 8000)
    option(serve, "--keep", "of what was read; 0 keeps nothing", 1024, metavar="MIB")
    key = "that clients must send (default: ASSISTED_API_KEY of the environment, else none)"
    option(serve, "--api-key", key, metavar="KEY")
    option(serve, "--allow-origin", "web pages that may ask; * for all", action="append", metavar="ORIGIN")
    option(serve, "--queue", "requests that may wait", 64, metavar="N")
    option(serve, "--rows", "requests answered together; 1 answers one after the other", 4, metavar="N")
    option(serve, "--chunk", "tokens of new prompts read between two pieces of other answers", 256, metavar="N")
    add_loading(serve)


def _serve(args: argparse.Namespace) -> None:
    from ..engine.pool import SessionPool
    from ..fast.sources import keep_steady
    from ..methods.shared.registry import windows
    from ..modeling import AssistedModelForCausalLM
    from ..serving import Server

    if not 0 <= args.port < 2**16:
        raise ValueError(f"port: {args.port} is none; give 1 to {2**16 - 1}, or 0 for any free one")
    options = loading(args)
    pool = SessionPool(args.keep * 2**20) if args.keep > 0 else None
    first, *others = args.draft or [None]
    options["draft_window"], *narrow = windows([first, *others], args.draft_window)
    pair = AssistedModelForCausalLM.from_pretrained(args.target, draft=first, sessions=pool, **options)
    require_tokenizer(pair.tokenizer, args.target)
    pairs = {first or pair.spec.name: pair}
    further: dict[str, Any] = {name: options.get(name) for name in ("draft_length", "draft_quantization")}
    for draft, window in zip(others, narrow, strict=True):
        pairs[draft] = AssistedModelForCausalLM.from_models(
            pair.target, draft, tokenizer=pair.tokenizer, sessions=pool, draft_window=window, **further
        )
    for one in pairs.values():  # nobody else has these models
        keep_steady([one.target, *one.drafter.modules])
    name = args.name or Path(args.target).name

    def log(entry: dict[str, Any]) -> None:
        if args.json:
            print_json(entry, indent=None)
        else:
            report = entry.get("report", {})
            said = f"{report['new_tokens']} tokens, {report['tokens_per_pass']:.2f} per forward pass" if report else ""
            said += f", {report['ran']}" if report else ""
            said = entry.get("error", {}).get("message", said)
            print(f"{entry['status']} {entry['path']} {entry['seconds']:.2f} s {said}", file=sys.stderr)

    key = args.api_key or os.environ.get("ASSISTED_API_KEY") or None
    with Server(
        pairs, name, (args.host, args.port), log, key, args.allow_origin or [], args.queue, args.rows, args.chunk
    ) as server:
        url = f"http://{args.host}:{server.server_port}/v1"
        if args.json:
            print_json({"url": url, "model": name, "drafts": list(server.answers.pairs)}, indent=None)
        else:
            said = f"{name} at {url}, drafts: {', '.join(server.answers.pairs)}; Ctrl-C ends it"
            print(said, file=sys.stderr, flush=True)
        server.serve_forever()
