"""Quantized targets on a CPU."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from shared import Case, Section, page, shown
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from assisted import AssistedModelForCausalLM, zoo

PROMPTS = ("def mean(values):\n", "class Stack:\n", "import os\n\n\ndef walk(", "for line in ", "try:\n    ", "def test_",
           "x = [1, 2, 3]\n", "          return self.", "@property\ndef ", "with open(path) as file:\n")  # fmt: skip
DRAFTS, HEAD = ("suffix", "early-exit:8", "self:int8", "zoo:draft"), "zoo:eagle3"
CALL: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
USUAL = "5.23.0"  # version of transformers, which the page names once
Made = dict[str, Any]  # what `from_pretrained` is given


def config(name: str, inner: str = "", saved: bool = False, **fields: Any) -> Callable[[Path], Made]:
    """Quantized while it is loaded. name: of a config of transformers. inner: of torchao's. saved: from a checkpoint."""

    def make(folder: Path) -> Made:
        home, _, kind = f"torchao.{inner}".rpartition(".")
        given = (getattr(import_module(home), kind)(**({"group_size": 64} if "Int4" in kind else {})),) if inner else ()
        method, path = getattr(transformers, name)(*given, **fields), zoo.folder("target")
        if not saved:
            return {"path": path, "quantization_config": method}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=method)
        model.save_pretrained(folder)
        return {"path": folder}

    return make


BNB, AO = "BitsAndBytesConfig", "TorchAoConfig"
FORMATS: dict[str, tuple[str, Callable[[Path], Made]]] = {
    "torchao int8": ("torchao", config(AO, "quantization.Int8WeightOnlyConfig")),
    "torchao int8, saved": ("torchao", config(AO, "quantization.Int8WeightOnlyConfig", saved=True)),
    "torchao int8, inputs too": ("torchao", config(AO, "quantization.Int8DynamicActivationInt8WeightConfig")),
    "torchao float8": ("torchao", config(AO, "quantization.Float8WeightOnlyConfig")),
    "torchao int4": ("torchao", config(AO, "quantization.Int4WeightOnlyConfig")),
    "torchao int4, its prototype for CPUs": (
        "torchao", config(AO, "prototype.quantization.int4.PrototypeInt4WeightOnlyConfig")),
    **{f"quanto {kind}": ("optimum-quanto", config("QuantoConfig", weights=kind)) for kind in ("int8", "int4", "float8")},
    "bitsandbytes nf4": ("bitsandbytes", config(BNB, saved=True, load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "bitsandbytes int8": ("bitsandbytes", config(BNB, saved=True, load_in_8bit=True)),
    "bitsandbytes int8, no threshold": (
        "bitsandbytes", config(BNB, saved=True, load_in_8bit=True, llm_int8_threshold=0.0)),
    "HQQ": ("hqq", config("HqqConfig", nbits=4, group_size=64)),
    "SINQ": ("sinq", config("SinqConfig", modules_to_not_convert=["lm_head"])),
}  # fmt: skip
"""By name: the package that it needs, and what makes it."""


def gap(model: Any, plain: torch.Tensor, found: torch.Tensor) -> float:
    """How far apart the logits of two texts' first different tokens are, in standard deviations of all."""
    at = int((plain != found).any(0).nonzero()[0])
    logits = model(plain[:, :at]).logits[0, -1].float()
    return float((logits[plain[0, at]] - logits[found[0, at]]).abs() / logits.std())


@torch.no_grad()
def tried(given: Made, dtype: torch.dtype) -> dict[str, Any]:
    """What happens to a target in this dtype, with each draft. The head drafts for targets of its own width only."""
    path, rest = given["path"], {name: value for name, value in given.items() if name != "path"}
    row: dict[str, Any] = {"asked": str(dtype)[6:], "drafts": {}}
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
    plain: list[torch.Tensor] = []
    for draft in (*DRAFTS, HEAD):
        try:
            if draft in (DRAFTS[0], HEAD):  # the others draft for the target that is loaded
                pair = AssistedModelForCausalLM.from_pretrained(path, draft=draft, draft_length=4, dtype=dtype, **rest)
            else:
                pair = AssistedModelForCausalLM.from_models(pair.target, draft, 4, tokenizer)
            plain = plain or [pair.target.generate(ids, **CALL) for ids in prompts]
        except Exception as error:
            if not plain:
                return {**row, "error": said(error)}
            row["drafts"][draft] = {"error": said(error)}
            continue
        row["dtype"] = str(pair.dtype)[6:]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            texts = [pair.generate(ids, **CALL) for ids in prompts]
        parted = [gap(pair.target, one, other) for one, other in zip(plain, texts, strict=True) if not one.equal(other)]
        row["drafts"][draft] = {
            "equal": len(texts) - len(parted), "gap": max(parted, default=None), "drafted": pair.totals.drafted,
            "tokens_per_pass": pair.totals.tokens_per_pass, "passes": pair.report.passes, "because": pair.report.because,
            "warnings": sorted({*pair.totals.warnings, *(str(w.message) for w in caught)}),
        }  # fmt: skip
    return row


def said(error: Exception) -> str:
    """Without the path of the temporary folder."""
    text = re.sub(r"target: loading \S+ failed: |\S*/target/target.gguf", "", " ".join(str(error).split()))
    return text[:400] if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:400]}"


def run(name: str, path: str) -> list[dict[str, Any]]:
    """The rows of a format, or of a path, by dtype."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = {"path": path} if path else FORMATS[name][1](Path(folder, "target"))
        except Exception as error:
            return [{"asked": "any", "error": said(error), "drafts": {}}]
        return [tried(given, dtype) for dtype in (torch.float32, torch.bfloat16)]


def loaded_in(rows: list[dict[str, Any]]) -> str:
    names = {row["asked"]: row["dtype"] for row in rows if "dtype" in row}
    return ", ".join(asked if asked == got else f"{got} for {asked}" for asked, got in names.items()) or "no"


def drafting(rows: list[dict[str, Any]]) -> str:
    """Those that draft, with the tokens per forward pass of the target in the first dtype that loads."""
    tried = next((row["drafts"] for row in rows if row["drafts"]), {})
    found = [f"`{name}` {one['tokens_per_pass']:.1f}" for name, one in tried.items() if one.get("drafted")]
    return ", ".join(found) or "none"


def same(rows: list[dict[str, Any]], asked: str) -> str:
    """Equal texts of all drafts together, and the largest gap."""
    tried = [one for row in rows if row["asked"] == asked for one in row["drafts"].values() if "equal" in one]
    gaps = [one["gap"] for one in tried if one["gap"] is not None]
    apart = "" if not gaps else ", ties" if max(gaps) == 0 else f", gap {max(gaps):.1g}"
    return f"{sum(one['equal'] for one in tried)} of {len(tried) * len(PROMPTS)}{apart}" if tried else "–"


def why(rows: list[dict[str, Any]]) -> str:
    """Why a target does not load, and why one draft or all of them do not draft. That there is no copy of a quantized target is
    said on the page."""
    found = [f"{row['asked']}: {row['error']}" for row in rows if "error" in row]
    for row in rows:
        for name, one in row["drafts"].items():
            reason = one.get("error") or one.get("because") or " ".join(one["warnings"])
            found += [f"`{name}`: {reason}"] if reason and "quantized already" not in reason else []
    if len({text.partition(": ")[2] for text in found}) == 1:
        found = [found[0].partition(": ")[2]]
    return "<br>".join(text[:200].replace("|", "/") for text in dict.fromkeys(found))


def measure(args: Any) -> list[dict[str, Any]]:
    """The rows of the file, with those of the formats that are tried."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = json.loads(args.path.read_text()) if args.path and args.path.is_file() else []
    for name, _, path in (each.partition("=") for each in args.formats or FORMATS):
        needed = [one for one in args.packages if path] or [FORMATS[name][0]] * (not path)
        try:
            libraries = {package: version(package) for package in ("transformers", *needed)}
        except PackageNotFoundError as error:
            print(f"{name}: not installed: pip install {error.name}", file=sys.stderr)
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:  # some libraries end their process
            try:
                rows = pool.submit(run, name, path).result()
            except BrokenProcessPool:
                rows = [{"asked": "any", "error": "it ended the process", "drafts": {}}]
        row = {"format": name, "versions": libraries, "torch": f"torch {torch.__version__}", "rows": rows}
        key = name, libraries["transformers"]
        others = [each for each in found if (each["format"], each["versions"]["transformers"]) != key]
        order = [*dict.fromkeys(each["format"] for each in found), name]
        found = sorted([*others, row], key=lambda each: (order.index(each["format"]), each["versions"]["transformers"]))
        args.save(found)
    return found


def text_of(found: list[Made]) -> str:
    head = (
        f"`python benchmarks/run.py quantized`, run in several environments, with "
        f"{', '.join(sorted({row['torch'] for row in found}))}, and with transformers {USUAL} "
        f"where no other version is named: {len(PROMPTS)} prompts, {CALL['max_new_tokens']} tokens each, greedy, on a CPU. The "
        "target is the shipped one, padded to rows of 256 for most GGUF files; the libraries rounded its weights, without "
        "calibration. "
        "A gap is the difference between the logits of the first two tokens that differ, in standard deviations of all logits."
    )
    known = "transformers", USUAL
    columns: dict[str, Any] = {
        "format": "{format}",
        "libraries": lambda row: ", ".join(f"{n} {v}" for n, v in row["versions"].items() if (n, v) != known) or "none",
        "loads in": lambda row: loaded_in(row["rows"]),
        "drafts, tokens per pass": lambda row: drafting(row["rows"]),
        "same text in float32": lambda row: same(row["rows"], "float32"),
        "in bfloat16": lambda row: same(row["rows"], "bfloat16"),
        "remarks": lambda row: why(row["rows"]),
    }
    return page(head, shown(columns, found))


quantized = Case(
    "quantized",
    """Quantized targets on a CPU, as the libraries of today load them: which load, with which drafts, whether the text stays.

    python benchmarks/run.py quantized --formats "torchao int8" AWQ=FOLDER --packages gptqmodel --json --pages

Every format whose library is in this environment is tried, each in a process of its own; for the others, the line that
installs it is printed. NAME=PATH tries a checkpoint of the shipped target that another program has written. Rows are added to
the file, or replace those of the same format and version of transformers. Nothing is timed.
""",
    measure,
    options={
        "formats": ([], "to try, by name, or NAME=PATH; all by default"),
        "packages": ([], "whose versions the rows of paths name"),
    },
    quick={"formats": ["torchao int8"]},
    sections=(Section("howto/quantize", "quantized"),),
    markdown=text_of,
)
