"""What several commands share: arguments, where models are placed, JSON.

Knows argparse; torch is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from .. import extras

DEFAULT = " (default: %(default)s)"
STORED = ("float32", "bfloat16", "float16")  # of files
DTYPES = ("auto", *STORED)


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that suggests a command for a misspelled one, and keeps the lines of examples below its help."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": _Formatter} | kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown argument of a command shows the usage of that command."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(found, "parser", self).error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += extras.did_you_mean(str(value), map(str, action.choices or ()))
            raise


def option(parser: Any, name: str, help: str, default: Any = None, before: str = "", **more: Any) -> None:
    """Add an option, which is of its default's type and says so in its help; with the default False, a flag. before: its name
    in version 0.1, which works until 0.3 and names this one. more: for `add_argument`."""
    if default is False:
        more["action"] = "store_true"
    elif default is not None:
        help += DEFAULT
        more = {"type": type(default), **more}
    added = parser.add_argument(name, default=default, help=help, **more)
    if before:
        more = {"type": added.type, "dest": added.dest, "action": Renamed, "const": name}
        parser.add_argument(before, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more)


class Renamed(argparse.Action):
    """An option under its earlier name. const: the name of today."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        print(f"assisted: {option} is called {self.const} now; the old name goes with version 0.3", file=sys.stderr)
        setattr(namespace, self.dest, values)


def add_json(parser: Any, what: str = "") -> None:
    """`--json`; or, where the results are named (`what`), `--json [FILE]` for `print_or_write`."""
    if not what:
        option(parser, "--json", "print the result as JSON", False)
        return
    text = f"write {what} to FILE; without FILE or with -, print it as JSON"
    option(parser, "--json", text, nargs="?", const="-", metavar="FILE")


def add_text(parser: Any, purpose: str, use: str) -> None:
    """What `read_text` reads, and `--written`. purpose: what the text is for. use: what is done with documents, in words."""
    option(parser, "--text", f"text to {purpose}: files, folders, patterns; or zoo", nargs="+", metavar="PATH")
    option(parser, "--dataset", f"dataset of the datasets library to {purpose}", metavar="NAME[:CONFIG][:SPLIT]")
    option(parser, "--documents", f"{use} at most N documents of the dataset", type=int, metavar="N")
    written = "add N tokens that the target generates, as continuations of the text"
    option(parser, "--written", written, type=int, metavar="N")


def add_loading(
    parser: Any,
    length: str | None = "the pair's",
    dtype: str | None = None,
    device: str = "auto",
    threads: int | None = None,
) -> None:
    """What `loading` takes, with its defaults. length: in words; None leaves out `--draft-length`."""
    add_draft_window(parser)
    formats = "number format of the draft: nf4, fp4, int8, int4, ... (default: its own)"
    option(parser, "--draft-quantization", formats, metavar="NAME")
    if length is not None:
        lengths = f'tokens per draft, or "adaptive", "confidence", ... (default: {length})'
        option(parser, "--draft-length", lengths, type=int_or_name, metavar="N")
    own = dtype or "the checkpoint's on a CPU, else half precision"
    add_dtype(parser, own, dtype)
    option(parser, "--device", "cpu, cuda, ...; auto uses an accelerator if there is one", device)
    threads_help = f"CPU threads (default: {threads or 'chosen by torch'})"
    parser.add_argument("--threads", type=int, default=threads, help=threads_help)


def add_dtype(parser: Any, shown: str, default: str | None = None) -> None:
    """shown: the default, in words."""
    text = f"dtype of the models (default: {shown})"
    parser.add_argument("--dtype", type=dtype_name, default=default, choices=DTYPES, help=text)


def add_draft_window(parser: Any) -> None:
    text = "keep the draft's keys and values of the last N tokens and the first 4 (default: of all)"
    option(parser, "--draft-window", text, type=int, metavar="N")


def add_target(parser: argparse.ArgumentParser, group: Any, what: str) -> None:
    """The target, as the first argument or as `--target`; zoo:target if neither is given. what: it may be, in words."""
    parser.set_defaults(target="zoo:target")
    group.add_argument("target", nargs="?", default=argparse.SUPPRESS, help=f"{what} (default: zoo:target)")
    group.add_argument(
        "--target", dest="target", default=argparse.SUPPRESS, metavar="TARGET", help="the same as an option"
    )


def add_temperature(parser: Any) -> None:
    option(parser, "--temperature", "sampling temperature; 0 is greedy decoding", 0.0)


def add_pair(
    parser: argparse.ArgumentParser, draft: str = "suffix", target: str = "zoo:target", **defaults: Any
) -> None:
    """draft: the default, in words. target: the default; defaults: of `add_loading`."""
    grown = ", or grown:SIZE, the shipped target at the cost of a larger one" if target.startswith("grown:") else ""
    option(parser, "--target", f"Hub id, folder or zoo: name{grown}", target)
    known = "Hub id, folder, zoo: name, self:nf4, suffix, ngram, ..., or several as in suffix+zoo:draft"
    option(parser, "--draft", f"{known} (default: {draft}; a saved pair's own)")
    add_loading(parser, **defaults)


def add_generation(parser: argparse.ArgumentParser, draft: str = "suffix") -> None:
    add_pair(parser, draft)
    option(parser, "--max-new-tokens", "new tokens of each text", 256)
    add_temperature(parser)
    for name, kind in (("top-p", float), ("top-k", int)):
        option(parser, f"--{name}", f"{name} of the sampling (default: the model's generation config)", type=kind)
    option(parser, "--seed", "seed of the sampling", type=int)
    option(parser, "--plain", "decode without drafts, to compare", False)
    option(parser, "--quiet", "omit the report on standard error", False)


def int_or_name(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value


def dtype_name(value: str) -> str:
    """A dtype's name as torch has it; fp16 and the like are its short names."""
    return extras.DTYPES.get(value, value)


def use_threads(count: int | None) -> None:
    """What `--threads` names; None is torch's own choice."""
    import torch

    if count is not None:
        torch.set_num_threads(count)


def device(name: str) -> str:
    """What `--device` names. Raises ValueError for a device that this machine does not have."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = "cpu" if accelerator is None else accelerator.type
    if name != "auto" and name.partition(":")[0] not in ("cpu", here):
        raise ValueError(f"device: {name} is not here; give {here} or auto")
    return here if name == "auto" else name


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """`--device`, `--dtype`, `--draft-quantization`, `--draft-window` and `--draft-length` as `from_pretrained` takes them.
    torch takes `--threads`."""
    use_threads(args.threads)
    where = device(args.device)
    found: dict[str, Any] = {} if where == "cpu" else {"device_map": {"": where}}
    for name in ("dtype", "draft_quantization", "draft_window", "draft_length"):
        if getattr(args, name) is not None:
            found[name] = getattr(args, name)
    return found


def load(args: argparse.Namespace, target: str | None = None, draft: str | None = None) -> Any:
    """The pair that the arguments name, with a tokenizer. draft: of this target if `--draft` is not given."""
    from ..modeling import AssistedModelForCausalLM

    if args.draft is None and args.target == target:
        args.draft = draft
    model = AssistedModelForCausalLM.from_pretrained(args.target, draft=args.draft, **loading(args))
    require_tokenizer(model.tokenizer, args.target)
    return model


def sampling(args: argparse.Namespace) -> dict[str, Any]:
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


def target_and_tokenizer(name: str, **chosen: Any) -> tuple[Any, Any]:
    """The target of this name and its tokenizer. chosen: for `from_pretrained`. Raises ValueError without a tokenizer."""
    from .. import zoo
    from ..loading.gguf import load_model, reading_once
    from ..loading.vocabulary import find_tokenizer

    path = zoo.resolve(name)
    with reading_once():
        target, tokenizer = load_model(path, **chosen), find_tokenizer(path, padding_side="left")
    require_tokenizer(tokenizer, name)
    return target, tokenizer


def require_tokenizer(tokenizer: Any, target: str) -> None:
    if tokenizer is None:
        raise ValueError(f"target: {target} has no tokenizer beside it, and text needs one")


def typed() -> str:
    """The command as it was typed, to be noted beside its result."""
    return shlex.join(["assisted", *sys.argv[1:]])


def print_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent), flush=True)


def print_or_write(file: str | None, value: Any, text: str, indent: int = 2) -> None:
    """Print text, and write value to the file that `--json` names. file: "-" prints value instead."""
    written = json.dumps(value, indent=indent)
    print(written if file == "-" else text, flush=True)
    if file is not None and file != "-":
        Path(file).write_text(written + "\n", encoding="utf-8")
