"""The command line: `assisted demo | generate | chat | train | bench | doctor | audit | plan | handover | ...`.

Knows arguments, standard streams and exit codes. The work is done elsewhere, in modules that a command imports when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from . import audit, bench, doctor, handover, plan, serve, shrink
from . import train as training
from .arguments import (
    DEFAULT,
    Parser,
    add_json_file,
    add_loading,
    add_temperature,
    loading,
    print_json,
    require_tokenizer,
    use_threads,
)
from .terminal import Loading, Wrapped, dimmed

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
_CHAT_HELP = "/reset starts a new conversation; /quit or Ctrl-D ends; Ctrl-C stops the program."


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
    run: Any
    if args.json:
        from ..lab.bench import brief as run
    else:
        from .demo import show as run
    model = _load(args, "zoo:target", "zoo:draft")
    sizes = (args.prompts, args.max_new_tokens, args.repeats, args.seconds)
    result = run(model, *sizes, also=_quantized(model, args))
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

    model = _load(args)
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
        streamer=None if args.json else _streamer(model),
        **_sampling(args),
    )
    if args.json:
        new = output[0, ids.shape[1] :]
        completion = model.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        print_json({"prompt": prompt, "completion": completion, "report": model.report.to_dict()})
    elif not args.quiet:
        _note(f"\n{model.report}")


def _chat(args: argparse.Namespace) -> None:
    from ..chat import ContextFull, Conversation

    model = _load(args, "zoo:smollm2", "suffix+zoo:smollm2-eagle3")
    conversation = Conversation(model, args.system)
    sampling = _sampling(args)
    if sys.stdin.isatty():
        _note(f"{args.target}, drafted by {args.draft or model.spec.name}. /help lists the commands.")
        with Loading(), warnings.catch_warnings(record=True) as caught:
            conversation.prepare(**sampling)
        for told in dict.fromkeys(str(one.message) for one in caught):
            _note(told)
    for message in _lines():
        if message == "/quit":
            break
        if message == "/reset":
            conversation.reset()
            continue
        if re.fullmatch(r"/\w+", message):
            _note(_CHAT_HELP if message == "/help" else f"{message} is no command. {_CHAT_HELP}")
            continue
        streamer = None if args.json else _streamer(model, args.show_drafts)
        model.watch = getattr(streamer, "see", None)
        try:
            with contextlib.redirect_stdout(Wrapped(sys.stdout)) if sys.stdout.isatty() else contextlib.nullcontext():
                reply = conversation.say(message, args.max_new_tokens, streamer=streamer, **sampling)
        except ContextFull as error:  # the conversation before this message still stands
            if args.json:
                print_json({"message": message, "error": str(error)}, indent=None)
            print(f"assisted: error: {error}", file=sys.stderr)
            continue
        finally:
            model.watch = None
        report: Any = model.report
        if args.json:
            turn = {"message": message, "reply": reply.text, "prompt_tokens": reply.prompt_tokens}
            print_json({**turn, "cached_tokens": reply.cached_tokens, "report": report.to_dict()}, indent=None)
        elif not args.quiet:
            _note(f"[{_brought(model)}, {reply.cached_tokens} of {reply.prompt_tokens} prompt tokens cached]")


def _note(text: str) -> None:
    """A remark on standard error; on a terminal it is dimmed, and its lines end between words."""
    out = Wrapped(sys.stderr) if sys.stderr.isatty() else sys.stderr
    print(dimmed(text, sys.stderr), file=out)  # type: ignore[arg-type]


def _brought(model: Any) -> str:
    """What drafting brought in the last call: its prompt and rounds, against the same prompt and, for every token, the
    measured time of a forward pass without a draft."""
    report = model.report
    found = f"{report.new_tokens} tokens in {report.seconds:.2f} s, {report.tokens_per_pass:.2f} per forward pass"
    costs = None if model.length is None else model.length.costs
    took = report.draft_seconds + report.verify_seconds
    alone = report.plain_seconds_per_token or (None if costs is None else costs.verify_seconds(1))
    if alone is None or not report.target_passes or not took:
        return found
    decoded = report.tokens_per_pass * report.target_passes
    without = report.prompt_seconds + decoded * alone
    return f"{found}, {without / took:.2f} times as fast as without drafts ({alone * 1e3:.1f} ms per token)"


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


def _load(args: argparse.Namespace, target: str | None = None, draft: str | None = None) -> Any:
    """The pair that the arguments name, with a tokenizer. draft: of this target if `--draft` is not given."""
    from ..modeling import AssistedModelForCausalLM

    use_threads(args.threads)
    if args.draft is None and args.target == target:
        args.draft = draft
    model = AssistedModelForCausalLM.from_pretrained(args.target, draft=args.draft, **loading(args))
    require_tokenizer(model.tokenizer, args.target)
    return model


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate`. Raises ValueError for those that are not possible, or have no effect at temperature 0."""
    import torch

    from ..distribution import require_seed, require_temperature

    require_temperature(args.temperature)
    if args.seed is not None:
        require_seed(args.seed)
        torch.manual_seed(args.seed)
    common = {"assisted": not args.plain}
    chosen = {name: value for name in ("top_p", "top_k") if (value := getattr(args, name)) is not None}
    if args.temperature == 0:
        for name in chosen:
            raise ValueError(f"{name}: has no effect at temperature 0; give --temperature as well")
        return {"do_sample": False, **common}
    return {"do_sample": True, "temperature": args.temperature, **chosen, **common}


def _streamer(model: Any, coloured: bool = False) -> Any:
    from transformers import TextStreamer

    if coloured:
        from .watch import ColouredStreamer

        return ColouredStreamer(model.tokenizer)
    return TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _lines() -> Iterator[str]:
    """The lines of standard input, without empty ones."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


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
        if file:
            add_json_file(added, file)
        else:
            added.add_argument("--json", action="store_true", help="print the result as JSON")
        return added

    demo = command("demo", _demo, "show how a draft and a target write held-out code together, and what it costs")
    _add_pair(demo, "zoo:draft for zoo:target, else suffix", device="cpu", dtype="float32", threads=1)
    demo.add_argument("--prompts", type=int, default=5, help="number of prompts to measure" + DEFAULT)
    demo.add_argument("--max-new-tokens", type=int, default=48, help="new tokens per prompt" + DEFAULT)
    demo.add_argument("--repeats", type=int, default=5, help="timed runs per method, at most" + DEFAULT)
    demo.add_argument("--seconds", type=float, default=36.0, help="approximate time for all measurements" + DEFAULT)

    generate = command("generate", _generate, "complete a text and stream it to standard output")
    generate.add_argument("prompt", nargs="?", default="-", help="text to complete; - or nothing reads standard input")
    _add_generation(generate)

    chat = command("chat", _chat, "talk to a pair, one line per turn, with streamed answers")
    chat.add_argument("--system", help="system message of the conversation")
    chat.add_argument("--show-drafts", action="store_true", help="color the tokens that were drafted and accepted")
    _add_generation(chat, "suffix+zoo:smollm2-eagle3 for zoo:smollm2, else suffix")
    chat.set_defaults(target="zoo:smollm2")

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


def _add_pair(parser: argparse.ArgumentParser, draft: str = "suffix", **defaults: Any) -> None:
    """draft: the default, in words. defaults: of `add_loading`."""
    parser.add_argument("--target", default="zoo:target", help="Hub id, folder or zoo: name" + DEFAULT)
    parser.add_argument(
        "--draft",
        help=f"Hub id, folder, zoo: name, self:nf4, suffix, ngram, ..., or several as in suffix+zoo:draft "
        f"(default: {draft}; a saved pair's own)",
    )
    add_loading(parser, **defaults)


def _add_generation(parser: argparse.ArgumentParser, draft: str = "suffix") -> None:
    _add_pair(parser, draft)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="new tokens of each text" + DEFAULT)
    add_temperature(parser)
    parser.add_argument("--top-p", type=float, help="top-p of the sampling (default: the model's generation config)")
    parser.add_argument("--top-k", type=int, help="top-k of the sampling (default: the model's generation config)")
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    parser.add_argument("--plain", action="store_true", help="decode without drafts, to compare")
    parser.add_argument("--quiet", action="store_true", help="omit the report on standard error")
