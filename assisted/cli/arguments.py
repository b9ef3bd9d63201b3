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

from ..loading import names

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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += names.did_you_mean(str(value), map(str, action.choices or ()))
            raise


def add_json(parser: Any, what: str = "") -> None:
    """`--json`; or, where the results are named (`what`), `--json [FILE]` for `print_or_write`."""
    if not what:
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        return
    text = f"write {what} to FILE; without FILE or with -, print it as JSON"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)


def add_text(parser: Any, purpose: str, use: str) -> None:
    """What `read_text` reads, and `--written`. purpose: what the text is for. use: what is done with documents, in words."""
    parser.add_argument(
        "--text", nargs="+", metavar="PATH", help=f"text to {purpose}: files, folders, patterns; or zoo"
    )
    parser.add_argument(
        "--dataset", metavar="NAME[:CONFIG][:SPLIT]", help=f"dataset of the datasets library to {purpose}"
    )
    parser.add_argument("--documents", type=int, metavar="N", help=f"{use} at most N documents of the dataset")
    parser.add_argument(
        "--written", type=int, metavar="N", help="add N tokens that the target generates, as continuations of the text"
    )


def add_loading(
    parser: Any,
    length: str | None = "the pair's",
    dtype: str | None = None,
    device: str = "auto",
    threads: int | None = None,
) -> None:
    """What `loading` takes, with its defaults. length: in words; None leaves out `--draft-length`."""
    add_draft_window(parser)
    parser.add_argument(
        "--draft-quantization",
        metavar="NAME",
        help="number format of the draft: nf4, fp4, int8, int4, ... (default: its own)",
    )
    if length is not None:
        parser.add_argument(
            "--draft-length",
            type=int_or_name,
            metavar="N",
            help=f'tokens per draft, or "adaptive", "confidence", ... (default: {length})',
        )
    checkpoint = "the checkpoint's on a CPU, else half precision"
    parser.add_argument(
        "--dtype",
        type=dtype_name,
        default=dtype,
        choices=DTYPES,
        help=f"dtype of the models (default: {dtype or checkpoint})",
    )
    parser.add_argument(
        "--device", default=device, help="cpu, cuda, ...; auto uses an accelerator if there is one" + DEFAULT
    )
    parser.add_argument(
        "--threads", type=int, default=threads, help=f"CPU threads (default: {threads or 'chosen by torch'})"
    )


def add_draft_window(parser: Any) -> None:
    parser.add_argument(
        "--draft-window",
        type=int,
        metavar="N",
        help="keep the draft's keys and values of the last N tokens and the first 4 (default: of all)",
    )


def add_target(parser: argparse.ArgumentParser, group: Any, what: str) -> None:
    """The target, as the first argument or as `--target`; zoo:target if neither is given. what: it may be, in words."""
    parser.set_defaults(target="zoo:target")
    group.add_argument("target", nargs="?", default=argparse.SUPPRESS, help=f"{what} (default: zoo:target)")
    group.add_argument(
        "--target", dest="target", default=argparse.SUPPRESS, metavar="TARGET", help="the same as an option"
    )


def add_temperature(parser: Any) -> None:
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy decoding" + DEFAULT
    )


def add_pair(parser: argparse.ArgumentParser, draft: str = "suffix", **defaults: Any) -> None:
    """draft: the default, in words. defaults: of `add_loading`."""
    parser.add_argument("--target", default="zoo:target", help="Hub id, folder or zoo: name" + DEFAULT)
    parser.add_argument(
        "--draft",
        help=f"Hub id, folder, zoo: name, self:nf4, suffix, ngram, ..., or several as in suffix+zoo:draft "
        f"(default: {draft}; a saved pair's own)",
    )
    add_loading(parser, **defaults)


def add_generation(parser: argparse.ArgumentParser, draft: str = "suffix") -> None:
    add_pair(parser, draft)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="new tokens of each text" + DEFAULT)
    add_temperature(parser)
    parser.add_argument("--top-p", type=float, help="top-p of the sampling (default: the model's generation config)")
    parser.add_argument("--top-k", type=int, help="top-k of the sampling (default: the model's generation config)")
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    parser.add_argument("--plain", action="store_true", help="decode without drafts, to compare")
    parser.add_argument("--quiet", action="store_true", help="omit the report on standard error")


def int_or_name(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value


def dtype_name(value: str) -> str:
    """A dtype's name as torch has it; fp16 and the like are its short names."""
    return names.DTYPES.get(value, value)


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
