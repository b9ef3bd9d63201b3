"""The command line: `assisted demo | generate | chat | train | bench | doctor | audit | plan | handover | ...`.

Knows arguments, standard streams and exit codes. The work is done elsewhere, in modules that a command imports when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from . import audit, bench, chat, doctor, handover, plan, serve, shrink
from . import train as training
from .arguments import Parser, add_generation, add_json, add_pair, load, option, print_json, sampling
from .terminal import Loading, note, streamer

FAILED, INTERRUPTED = 2, 130
_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn of kernels that did not load and of calls between other packages."""
_EXAMPLES = {
    "assisted": ("assisted demo", "assisted chat", 'assisted generate "def mean(values):" --draft zoo:draft'),
    "demo": ("assisted demo", "assisted demo --target DIR --draft DIR --device cuda"),
    "generate": (
        'assisted generate "def mean(values):" --draft zoo:draft',
        'echo "class Stack:" | assisted generate --temperature 0.8 --json',
        'assisted generate "Once" --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B',
    ),
    "chat": (
        "assisted chat",
        "assisted chat --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B",
        "assisted chat --show-drafts --temperature 0.7",
    ),
    "bench": ("assisted bench --prompts code", "assisted bench DIR --draft DIR --html bench.html"),
    "doctor": ("assisted doctor --quick", "assisted doctor DIR --draft DIR --draft suffix --text FILES"),
    "audit": (
        "assisted audit zoo:target --draft zoo:draft",
        "assisted audit http://localhost:8000/v1 --reference Qwen/Qwen3-0.6B",
    ),
    "plan": (
        "assisted plan Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --vram 12GB",
        'assisted plan Qwen/Qwen3-8B --card "RTX 4070" --context 4096',
    ),
    "serve": (
        "assisted serve zoo:target --draft zoo:draft --draft suffix",
        "assisted serve my-pair --port 8001 --json",
    ),
    "handover": ("assisted handover vllm PAIR --out DIR",),
    "shrink-vocabulary": ("assisted shrink-vocabulary DIR --target DIR --tokens 8192 --text zoo --out DIR",),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code. argv: the arguments; None takes those of the process.

    ASSISTED_TRACEBACK=1 in the environment shows the traceback of an error.
    """
    args = _parser().parse_args(argv)
    if args.alone is not None:
        args.alone.print_help()
        return 0
    try:
        with Loading(), _without_noise():
            args.command(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("ASSISTED_TRACEBACK") == "1":
            raise
        print(f"assisted: error: {error}", file=sys.stderr)
        return FAILED
    return 0


def _demo(args: argparse.Namespace) -> None:
    from ..lab.bench import Rules, brief

    run: Any = brief
    if not args.json:
        from .demo import show as run
    model, rules = load(args, "zoo:target", "zoo:draft"), Rules(args.max_new_tokens, args.repeats, seconds=args.seconds)
    result = run(model, args.count, rules, _quantized(model, args))
    if args.json:
        print_json(result.to_dict())


def _quantized(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The same pair with its draft in 4 bits, unless `--draft-quantization` is given."""
    from ..modeling import AssistedModelForCausalLM

    if args.draft_quantization is not None or model.spec.quantizes != "model":
        return {}
    try:
        pair = AssistedModelForCausalLM.from_models(
            model.target,
            draft=model.spec.model,
            draft_quantization="nf4",
            draft_length=args.draft_length,
            draft_window=args.draft_window,
        )
    except (ImportError, ValueError) as error:  # no backend, or layer shapes that it does not support
        print(f"Without a quantized draft: {error}", file=sys.stderr)
        return {}
    return {"assisted, nf4 draft": pair}


def _generate(args: argparse.Namespace) -> None:
    from ..chat import require_text

    model = load(args)
    if args.prompt == "-" and sys.stdin.isatty():
        print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    require_text("prompt", prompt)
    inputs = model.tokenizer(prompt, return_tensors="pt").to(model.target.device)
    ids = inputs.input_ids.long()  # of an empty text they would be floats
    output = model.generate(
        ids,
        attention_mask=inputs.attention_mask.long(),
        max_new_tokens=args.max_new_tokens,
        streamer=None if args.json else streamer(model),
        **sampling(args),
    )
    if args.json:
        new = output[0, ids.shape[1] :]
        completion = model.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        print_json({"prompt": prompt, "completion": completion, "report": model.report.to_dict()})
    elif not args.quiet:
        note(f"\n{model.report}")


def _zoo_list(args: argparse.Namespace) -> None:
    from .. import zoo

    models: list[dict[str, Any]] = []
    for name in zoo.NAMES:
        folder = zoo.folder(name)
        size = sum(path.stat().st_size for path in Path(folder).glob("*") if path.is_file())
        models.append({"name": f"zoo:{name}", "folder": folder, "bytes": size})
    for name, packaged in zoo.PACKAGED.items():
        file = packaged.file()
        found = {} if file is None else {"folder": str(file.parent), "file": str(file), "bytes": file.stat().st_size}
        row = {"name": f"zoo:{name}", "folder": None, "file": None, "bytes": 0, "install": packaged.command}
        models.append(row | found)
    if args.json:
        print_json(models)
        return
    for model in models:
        mebibytes = f"{model['bytes'] / 2**20:.1f} MiB" if model["bytes"] else "missing"
        where = model.get("file") or model["folder"] or f"not installed: {model['install']}"
        print(f"{model['name']:<26} {mebibytes:>10}  {where}")


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """No bars while models load, and nothing from packages about parts of theirs that are not used here."""
    for name in _NOISY:  # before transformers imports them
        logging.getLogger(name).setLevel(logging.ERROR)
    from ..loading.files import without_bars

    with without_bars():
        yield


def _parser() -> argparse.ArgumentParser:
    about = "Exact speculative decoding for Hugging Face causal language models."
    parser = Parser(prog="assisted", description=about, epilog=_examples("assisted"))
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(alone=parser)
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(
        name: str, run: Any, text: str, group: Any = commands, page: str = "", file: str = ""
    ) -> argparse.ArgumentParser:
        """page: of docs/howto. file: what `--json` can write to a file, in words."""
        see = f" See docs/howto/{page}.md." if page else ""
        about = text[0].upper() + text[1:] + "." + see
        added = group.add_parser(name, help=text, description=about, epilog=_examples(name))
        added.set_defaults(command=run, alone=None)
        add_json(added, file)
        return added

    demo = command("demo", _demo, "show how a draft and a target write held-out code together, and what it costs")
    add_pair(demo, "zoo:draft for zoo:target, else suffix", device="cpu", dtype="float32", threads=1)
    option(demo, "--count", "number of prompts to measure", 5, before="--prompts")
    option(demo, "--max-new-tokens", "new tokens per prompt", 48)
    option(demo, "--repeats", "timed runs per method, at most", 5)
    option(demo, "--seconds", "approximate time for all measurements", 36.0)

    generate = command("generate", _generate, "complete a text and stream it to standard output")
    generate.add_argument("prompt", nargs="?", default="-", help="text to complete; - or nothing reads standard input")
    add_generation(generate)

    chat.add(command)
    training.add(commands, command)
    bench.add(command)
    doctor.add(command)
    audit.add(command)
    plan.add(command)
    serve.add(command)
    handover.add(command)
    shrink.add(command)

    zoo = commands.add_parser("zoo", help="list the models of zoo: names", description="List the models of zoo: names.")
    zoo.set_defaults(alone=zoo)
    actions = zoo.add_subparsers(metavar="ACTION")
    command("list", _zoo_list, "print names, sizes and folders, and which models are not installed", actions)
    return parser


def _examples(name: str) -> str | None:
    """The lines below a command's help."""
    lines = [f"  {line}" for line in _EXAMPLES.get(name, ())]
    return "\n".join(["examples:", *lines]) if lines else None
