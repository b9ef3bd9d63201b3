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
from .arguments import (
    Parser,
    add_generation,
    add_json,
    add_pair,
    add_temperature,
    load,
    loading,
    option,
    print_json,
    sampling,
    target_and_tokenizer,
)
from .terminal import Loading, note, streamer

FAILED, INTERRUPTED = 2, 130
_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn of kernels that did not load and of calls between other packages."""
_EXAMPLES = {
    "assisted": ("assisted demo", "assisted chat", 'assisted generate "def mean(values):" --draft zoo:draft'),
    "demo": (
        "assisted demo",
        "assisted demo --temperature 0.8 --max-new-tokens 96",
        "assisted demo --target DIR --draft DIR --device cuda",
    ),
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
        "assisted plan Qwen/Qwen3-8B --card 4070 --context 4096",
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
    from ..lab.grown import PREFIX

    run: Any = brief
    if not args.json:
        from .demo import show as run
    is_grown = args.target.startswith(PREFIX)
    pairs = _grown(args) if is_grown else {"assisted": load(args, "zoo:target", "zoo:draft")}
    rules = Rules(args.max_new_tokens, args.repeats, args.temperature, seconds=args.seconds)
    result = run(pairs, args.count, rules)
    if args.json:
        print_json(result.to_dict())


def _grown(args: argparse.Namespace) -> dict[str, Any]:
    """The shipped target at the size that `--target` names, with a draft; if none is chosen, also with the shipped head."""
    import torch

    from ..lab.grown import PREFIX, grow, parse, shipped_head
    from ..methods import Eagle
    from ..modeling import AssistedModelForCausalLM

    chosen, size = loading(args), args.target.removeprefix(PREFIX)
    parse(size)  # before anything is loaded
    device = chosen.pop("device_map", {"": "cpu"})[""]
    small, tokenizer = target_and_tokenizer("zoo:target", dtype=torch.float32)
    dtype = chosen.pop("dtype", "auto")
    target: Any = grow(small, size, device, None if dtype == "auto" else getattr(torch, dtype))
    target.name_or_path = args.target
    first = args.draft or "zoo:draft"
    drafts: dict[str, Any] = {f"with {first}": first}
    if args.draft is None and args.draft_quantization is None:
        drafts["with zoo:eagle3"] = Eagle(shipped_head(target), tree=False)
    return {
        name: AssistedModelForCausalLM.from_models(target, draft, tokenizer=tokenizer, **chosen)
        for name, draft in drafts.items()
    }


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
        added.set_defaults(command=run, alone=None, parser=added)
        add_json(added, file)
        return added

    demo = command("demo", _demo, "show how a draft and a target write held-out code together, and what it costs")
    grown = "zoo:draft and zoo:eagle3 for a grown target, zoo:draft for zoo:target, else suffix"
    add_pair(demo, grown, "grown:0.05b", device="cpu", dtype="float32", threads=1)
    option(demo, "--count", "number of prompts to measure", 4, before="--prompts")
    option(demo, "--max-new-tokens", "new tokens per prompt", 48)
    add_temperature(demo)
    option(demo, "--repeats", "timed runs per method, at most", 5)
    option(demo, "--seconds", "approximate time for all measurements", 30.0)

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
