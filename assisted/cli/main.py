"""The command line: `assisted demo | generate | chat | train | bench | doctor | grow | zoo`.

Knows arguments, standard streams and exit codes; the work is done elsewhere and imported when a command needs it.
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

from . import bench
from . import doctor as doctor_command
from . import grow as grow_command
from . import train as training
from .arguments import DEFAULT, DTYPES, int_or_name, loading, print_json, require_tokenizer, use_threads

__all__ = ["main"]

FAILED, INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command. argv: arguments, those of the process when None. Returns the exit code.

    Environment: ASSISTED_TRACEBACK=1 shows where an error comes from.
    """
    args = _parser().parse_args(argv)
    try:
        with _without_loading_bars():
            args.command(args)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("ASSISTED_TRACEBACK") == "1":
            raise
        print(f"assisted: error: {error}", file=sys.stderr)
        return FAILED
    return 0


def _demo(args: argparse.Namespace) -> None:
    # it warns of kernels that it can do without
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    use_threads(args.threads)
    sizes = (args.prompts, args.max_new_tokens, args.repeats, args.seconds)
    if args.json:
        from ..bench import brief

        model = _load(args, shipped="zoo:draft")
        print_json(brief(model, *sizes, also=_quantized(model, args)).to_dict())
    else:
        from .demo import show

        model = _load(args, shipped="zoo:draft")
        show(model, *sizes, also=_quantized(model, args))


def _quantized(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The same pair with the draft in 4 bits, unless the caller chose how the draft is quantized."""
    from ..drafters import DraftModel
    from ..modeling import AssistedModelForCausalLM

    if args.draft_quantization is not None or not isinstance(model.spec, DraftModel):
        return {}
    try:
        pair = AssistedModelForCausalLM.from_models(
            model.target, draft=model.spec.model, draft_quantization="nf4", draft_length=args.draft_length
        )
    except (ImportError, ValueError) as error:  # no backend, or layers of shapes it cannot take
        print(f"Without a quantized draft: {error}", file=sys.stderr)
        return {}
    return {"assisted, nf4 draft": pair}


def _generate(args: argparse.Namespace) -> None:
    model = _load(args)
    if args.prompt == "-" and sys.stdin.isatty():
        print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
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
        print(f"\n{model.report}", file=sys.stderr)


def _chat(args: argparse.Namespace) -> None:
    from ..chat import ContextFull, Conversation

    model = _load(args)
    conversation = Conversation(model, args.system)
    sampling = _sampling(args)
    if sys.stdin.isatty():
        print("/reset starts anew, /quit or Ctrl-D ends.", file=sys.stderr)
    for message in _lines():
        if message == "/quit":
            break
        if message == "/reset":
            conversation.reset()
            continue
        streamer = None if args.json else _streamer(model)
        try:
            reply = conversation.say(message, args.max_new_tokens, streamer=streamer, **sampling)
        except ContextFull as error:  # the conversation before this message still stands
            if args.json:
                print_json({"message": message, "error": str(error)}, indent=None)
            print(f"assisted: error: {error}", file=sys.stderr)
            continue
        report: Any = model.report
        if args.json:
            turn = {"message": message, "reply": reply.text, "prompt_tokens": reply.prompt_tokens}
            print_json({**turn, "cached_tokens": reply.cached_tokens, "report": report.to_dict()}, indent=None)
        elif not args.quiet:
            print(
                f"[{report.new_tokens} tokens in {report.seconds:.2f} s, {report.tokens_per_pass:.2f} a pass, "
                f"{reply.cached_tokens} of {reply.prompt_tokens} read before]",
                file=sys.stderr,
            )


def _zoo_list(args: argparse.Namespace) -> None:
    from .. import zoo

    models: list[dict[str, Any]] = [
        {"name": f"zoo:{name}", "folder": zoo.folder(name), "bytes": _size(zoo.folder(name))} for name in zoo.NAMES
    ]
    if args.json:
        print_json(models)
        return
    for model in models:
        size = f"{model['bytes'] / 2**20:.1f} MiB" if model["bytes"] else "not there"
        print(f"{model['name']:<26} {size:>10}  {model['folder']}")


def _zoo_card(args: argparse.Namespace) -> None:
    from ..recipe.card import measure, write

    if args.json:
        print_json(measure(args.models))
    else:
        print(write(args.models))


def _zoo_train(args: argparse.Namespace) -> None:
    from ..recipe.train import train

    folder = train(args.name, args.out, compile_layers=not args.no_compile, stop_after=args.stop_after)
    if args.json:
        print_json({"name": args.name, "folder": str(folder)})
    else:
        print(folder)


def _load(args: argparse.Namespace, shipped: str | None = None) -> Any:
    """The pair that the arguments name, with a tokenizer. shipped: what drafts for zoo:target where no draft is named."""
    from ..modeling import AssistedModelForCausalLM

    draft = args.draft
    if draft is None and args.target == "zoo:target":
        draft = shipped
    model = AssistedModelForCausalLM.from_pretrained(args.target, draft=draft, **loading(args))
    require_tokenizer(model.tokenizer, args.target)
    return model


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate`. Raises ValueError for those that temperature 0 would leave without effect."""
    import torch

    if args.seed is not None:
        torch.manual_seed(args.seed)
    common = {"assisted": not args.plain}
    chosen = {name: value for name in ("top_p", "top_k") if (value := getattr(args, name)) is not None}
    if args.temperature == 0:
        for name in chosen:
            raise ValueError(f"{name}: has no effect at temperature 0; give --temperature as well")
        return {"do_sample": False, **common}
    return {"do_sample": True, "temperature": args.temperature, **chosen, **common}


def _streamer(model: Any) -> Any:
    from transformers import TextStreamer

    return TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _lines() -> Iterator[str]:
    """What is typed or piped in, line by line, empty lines left out."""
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
def _without_loading_bars() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*") if path.is_file())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="assisted", description="Exact speculative decoding for Hugging Face causal language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str, group: Any = commands) -> argparse.ArgumentParser:
        added = group.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.set_defaults(command=run)
        added.add_argument("--json", action="store_true", help="print the result for a program to read")
        return added

    demo = command("demo", _demo, "watch a pair complete code it never saw, then see what that cost")
    _add_model(demo, device="cpu", dtype="float32", drafts="zoo:draft for zoo:target, else suffix")
    demo.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of the CPU; the shipped models are too small for more (default: %(default)s)",
    )
    demo.add_argument("--prompts", type=int, default=5, help="how many are measured (default: %(default)s)")
    demo.add_argument("--max-new-tokens", type=int, default=48, help="of each prompt (default: %(default)s)")
    demo.add_argument("--repeats", type=int, default=5, help="timed rounds, at most (default: %(default)s)")
    demo.add_argument("--seconds", type=float, default=36.0, help="for all measuring, about (default: %(default)s)")

    generate = command("generate", _generate, "complete a text; it is written to standard output as it comes")
    generate.add_argument("prompt", nargs="?", default="-", help="the text; - or nothing reads standard input")
    _add_model(generate)
    _add_generation(generate)

    chat = command("chat", _chat, "talk to a pair, a line a turn; the answers stream")
    chat.add_argument("--system", help="a system message")
    _add_model(chat)
    _add_generation(chat)

    training.add(commands, command)
    bench.add(commands)
    doctor_command.add(commands)
    grow_command.add(command)

    zoo = commands.add_parser("zoo", help="the shipped models", description="The shipped models.")
    actions = zoo.add_subparsers(required=True, metavar="ACTION")
    command("list", _zoo_list, "names, sizes and folders", actions)
    card = command("card", _zoo_card, "measure a folder of models on held-out code and write its model card", actions)
    card.add_argument("--models", type=Path, required=True, help="the folder that zoo train wrote")
    train = command("train", _zoo_train, "train a shipped model again, from nothing or from its checkpoint", actions)
    train.add_argument("name", help="target, draft (wants the target in the same folder) or draft-other-tokenizer")
    train.add_argument("--out", type=Path, required=True, help="the folder of all models; each gets its own in it")
    train.add_argument("--stop-after", type=int, metavar="N", help="stop with a checkpoint after N steps in all")
    train.add_argument(
        "--no-compile", action="store_true", help="do not compile the layers: no compiler needed, slower"
    )
    return parser


def _add_model(
    parser: argparse.ArgumentParser, device: str = "auto", dtype: str | None = None, drafts: str = "suffix"
) -> None:
    parser.add_argument("--target", default="zoo:target", help="Hub id, folder or zoo: name" + DEFAULT)
    parser.add_argument(
        "--draft",
        help=f"Hub id, folder, zoo: name, self:nf4, suffix, ngram, recycle, ... (default: {drafts}; a saved pair's own)",
    )
    parser.add_argument("--draft-quantization", metavar="NAME", help="nf4, fp4, int8, int4, ... (default: none)")
    parser.add_argument(
        "--draft-length",
        type=int_or_name,
        metavar="N",
        help='tokens a round, or "adaptive", "confidence", ... (default: the pair\'s)',
    )
    parser.add_argument(
        "--dtype",
        default=dtype,
        choices=DTYPES,
        help=f"(default: {dtype or 'chosen'})",
    )
    parser.add_argument(
        "--device", default=device, help="cpu, cuda, ..., auto takes an accelerator if there is one" + DEFAULT
    )


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, help="(default: the model's generation config)")
    parser.add_argument("--top-k", type=int, help="(default: the model's generation config)")
    parser.add_argument("--seed", type=int, help="of the sampling")
    parser.add_argument("--plain", action="store_true", help="without drafting, to compare")
    parser.add_argument("--quiet", action="store_true", help="no report on standard error")
