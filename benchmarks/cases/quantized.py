"""Quantized targets on a CPU."""

from __future__ import annotations

import ctypes
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
from safetensors.torch import load_file, save_file
from shared import Case, Section, page, shown
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from assisted import AssistedModelForCausalLM, zoo
from assisted.lab.handover.gguf import write_gguf

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # for gguf_files
PROMPTS = ("def mean(values):\n", "class Stack:\n", "import os\n\n\ndef walk(", "for line in ", "try:\n    ", "def test_",
           "x = [1, 2, 3]\n", "          return self.", "@property\ndef ", "with open(path) as file:\n")  # fmt: skip
DRAFTS, HEAD = ("suffix", "early-exit:8", "self:int8", "zoo:draft"), "zoo:eagle3"
CALL: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
USUAL = "5.23.0"  # version of transformers, which the page names once
GROUP = 64  # inputs that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Made = dict[str, Any]  # what `from_pretrained` is given
Make = Callable[[Path], Made]  # from an empty folder's path


def target(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("target"), **options)


def packed(pack: Callable[[torch.Tensor], dict[str, torch.Tensor]], **method: Any) -> Make:
    """A checkpoint in bfloat16 with what `pack` makes of every matrix in its layers."""

    def make(folder: Path) -> Made:
        target(dtype=torch.bfloat16).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            parts = pack(tensors.pop(name).float())
            tensors |= {name.removesuffix("weight") + part: given.contiguous() for part, given in parts.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": method}))
        return {"path": folder}

    return make


def words(numbers: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Numbers of 4 bits, [rows, columns], as words of 32 bits, [rows, columns / 8]."""
    total = (numbers.long().unflatten(1, (-1, 8))[..., order] << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def awq_or_gptq(weight: torch.Tensor, awq: bool) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(1, 15)
    numbers = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15).flatten(1)
    if awq:
        return {"qweight": words(numbers.T, AWQ_ORDER), "qzeros": words(zero.T, AWQ_ORDER), "scales": scale.T}
    index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return {"qweight": words(numbers).T, "qzeros": words(zero.T - 1), "scales": scale.T, "g_idx": index}


def fp8_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = weight.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    stored = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale[:, 0, :, 0]}


def auto_round(folder: Path) -> Made:
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    options = {"scheme": "W4A16", "group_size": GROUP, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    import_module("auto_round").AutoRound(target(), tokenizer, **options).quantize_and_save(
        str(folder), format="auto_round"
    )
    return {"path": next(folder.rglob("model*.safetensors")).parent}


def compressed(scheme: str) -> Make:
    """A preset of compressed-tensors, written by its own compressor; ranges of inputs are those of one text."""

    def make(folder: Path) -> Made:
        own, helpers = (import_module(f"compressed_tensors.{name}") for name in ("quantization", "quantization.utils"))
        model = target(dtype=torch.bfloat16)
        most: dict[torch.nn.Module, torch.Tensor] = {}
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        hooks = [m.register_forward_pre_hook(lambda m, given: most.update({m: given[0].abs().max()})) for m in linear]
        model(torch.arange(5, 300)[None])
        for hook in hooks:
            hook.remove()
        group = own.preset_name_to_scheme(scheme, ["Linear"])
        group.weights.group_size = GROUP if group.weights.group_size == 128 else group.weights.group_size
        own.apply_quantization_config(model, own.QuantizationConfig(config_groups={"all": group}, ignore=["lm_head"]))
        for module in [m for m in linear if getattr(m, "quantization_scheme", None)]:
            weight, args, top = module.weight.float(), module.quantization_scheme.weights, most[module]
            size = {"tensor": weight.numel(), "channel": weight.shape[1]}.get(args.strategy, args.group_size)
            parts = weight.reshape(-1, size)
            overall = None
            if hasattr(module, "weight_global_scale"):
                overall = module.weight_global_scale.data = helpers.generate_gparam(weight.min(), weight.max())
            scale, _ = helpers.calculate_qparams(parts.amin(-1), parts.amax(-1), args, overall)
            module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
            if hasattr(module, "input_global_scale"):
                module.input_global_scale.data = helpers.generate_gparam(-top, top)
            elif hasattr(module, "input_scale"):
                module.input_scale.data = helpers.calculate_qparams(
                    -top, top, module.quantization_scheme.input_activations
                )[0]
        writer = import_module("compressed_tensors.compressors").ModelCompressor.from_pretrained_model(model)
        writer.compress_model(model)
        model.save_pretrained(folder)
        writer.update_config(str(folder))
        return {"path": folder}

    return make


def config(name: str, inner: str = "", saved: bool = False, **fields: Any) -> Make:
    """Quantized while it is loaded. name: of a config of transformers. inner: of torchao's. saved: from a checkpoint."""

    def make(folder: Path) -> Made:
        home, _, kind = f"torchao.{inner}".rpartition(".")
        given = (
            (getattr(import_module(home), kind)(**({"group_size": GROUP} if "Int4" in kind else {})),) if inner else ()
        )
        method = getattr(transformers, name)(*given, **fields)
        if not saved:
            return {"path": zoo.folder("target"), "quantization_config": method}
        target(dtype=torch.bfloat16, quantization_config=method).save_pretrained(folder)
        return {"path": folder}

    return make


def padded() -> PreTrainedModel:
    """The target with rows of 256 numbers, which computes the same: zeros, and a head of attention whose output is not read."""
    small = target()
    old, fields = small.config.hidden_size, small.config.to_dict()
    fields |= {"hidden_size": 256, "num_attention_heads": 4, "rms_norm_eps": small.config.rms_norm_eps * old / 256}
    large = LlamaForCausalLM(type(small.config).from_dict(fields))
    for name, weight in large.state_dict().items():
        given = small.state_dict()[name] * ((old / 256) ** 0.5 if "norm" in name else 1)
        weight.zero_()[tuple(map(slice, given.shape))] = given
    return large


def gguf(kind: str, *others: str, of: str = "padded") -> Make:
    """A file of blocks that llama.cpp's quantizer writes. kind: of matrices. others: the kind of the embedding and of half the
    down and value projections, as in its mixtures; and that of rows which are no multiple of 256. of: the target."""

    def make(folder: Path) -> Made:
        own, library = import_module("gguf"), Path(str(import_module("xllamacpp").__file__)).parent
        quantize, kinds = ctypes.CDLL(str(next(library.glob("*.so")))).ggml_quantize_chunk, own.GGMLQuantizationType
        folder.mkdir()
        first, second = folder / "first.gguf", folder / "target.gguf"
        if of == "hybrid":
            import_module("gguf_files").write_hybrid(first)
        else:
            model, tokenizer = (
                padded() if of == "padded" else target(),
                AutoTokenizer.from_pretrained(zoo.folder("target")),
            )
            write_gguf(model, tokenizer, first, "target")
        reader = own.GGUFReader(first)
        writer = own.GGUFWriter(second, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                inner = field.types[-1] if field.types[0] == own.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
        for number, tensor in enumerate(reader.tensors):
            values = tensor.data
            if values.ndim < 2 or values.shape[1] % 32:
                writer.add_tensor(tensor.name, values)
                continue
            mixed = "token_embd" in tensor.name or (
                number % 2 and any(p in tensor.name for p in ("ffn_down", "attn_v"))
            )
            chosen = kinds[others[0] if others and mixed else kind]
            if values.shape[1] % own.GGML_QUANT_SIZES[chosen][0]:
                chosen = kinds[others[-1]]
            block, size = own.GGML_QUANT_SIZES[chosen]
            made = torch.zeros(len(values), values.shape[1] // block * size, dtype=torch.uint8).numpy()
            source, place = (ctypes.c_void_p(each.ctypes.data) for each in (values, made))
            quantize(int(chosen), source, place, *map(ctypes.c_int64, (0, *values.shape)), None)
            writer.add_tensor(tensor.name, made, raw_dtype=chosen)
        for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
            getattr(writer, step)()
        return {"path": second, "head": {"padded": None, "hybrid": "mtp"}.get(of, HEAD)}

    return make


BNB, AO, GGUF = "BitsAndBytesConfig", "TorchAoConfig", ("gguf", "xllamacpp")
FP8 = {"activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
FOURS = {"bits": 4, "group_size": GROUP}
SCHEMES = ("W4A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4A16", "NVFP4", "MXFP4A16")
FORMATS: dict[str, tuple[tuple[str, ...], Make]] = {
    **{f"compressed-tensors {scheme}": (("compressed-tensors",), compressed(scheme)) for scheme in SCHEMES},
    "AWQ": (("gptqmodel",), packed(lambda w: awq_or_gptq(w, True), quant_method="awq", zero_point=True, **FOURS)),
    "GPTQ": (("gptqmodel", "optimum"), packed(lambda w: awq_or_gptq(w, False), quant_method="gptq", sym=False, **FOURS)),
    "auto-round W4A16": (("auto-round",), auto_round),
    "FP8 in blocks": ((), packed(fp8_blocks, quant_method="fp8", **FP8)),
    "torchao int8": (("torchao",), config(AO, "quantization.Int8WeightOnlyConfig")),
    "torchao int8, saved": (("torchao",), config(AO, "quantization.Int8WeightOnlyConfig", saved=True)),
    "torchao int8, inputs too": (("torchao",), config(AO, "quantization.Int8DynamicActivationInt8WeightConfig")),
    "torchao float8": (("torchao",), config(AO, "quantization.Float8WeightOnlyConfig")),
    "torchao int4": (("torchao",), config(AO, "quantization.Int4WeightOnlyConfig")),
    "torchao int4, its prototype for CPUs": (
        ("torchao",), config(AO, "prototype.quantization.int4.PrototypeInt4WeightOnlyConfig")),
    **{f"quanto {kind}": (("optimum-quanto",), config("QuantoConfig", weights=kind)) for kind in ("int8", "int4", "float8")},
    "bitsandbytes nf4": (("bitsandbytes",), config(BNB, saved=True, load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "bitsandbytes int8": (("bitsandbytes",), config(BNB, saved=True, load_in_8bit=True)),
    "bitsandbytes int8, no threshold": (
        ("bitsandbytes",), config(BNB, saved=True, load_in_8bit=True, llm_int8_threshold=0.0)),
    "HQQ": (("hqq",), config("HqqConfig", nbits=4, group_size=GROUP)),
    **{f"GGUF {k}": (GGUF, gguf(k)) for k in ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")},
    "GGUF Q4_K_M": (GGUF, gguf("Q4_K", "Q6_K")),
    "GGUF Q4_K_M, rows of 192": (GGUF, gguf("Q4_K", "Q6_K", "Q5_0", of="target")),
    **{f"GGUF {k} of a Qwen3.5": (GGUF, gguf(k, of="hybrid")) for k in ("Q8_0", "IQ4_NL", "Q5_0", "MXFP4")},
}  # fmt: skip
"""By name: the packages that it needs, and what makes it."""


def gap(model: Any, plain: torch.Tensor, found: torch.Tensor) -> float:
    """How far apart the logits of two texts' first different tokens are, in standard deviations of all."""
    at = int((plain != found).any(0).nonzero()[0])
    logits = model(plain[:, :at]).logits[0, -1].float()
    return float((logits[plain[0, at]] - logits[found[0, at]]).abs() / logits.std())


@torch.no_grad()
def tried(given: Made, dtype: torch.dtype) -> dict[str, Any]:
    """What happens to a target in this dtype, with each draft."""
    path, head, rest = (
        given["path"],
        given.get("head", HEAD),
        {k: v for k, v in given.items() if k not in ("path", "head")},
    )
    row: dict[str, Any] = {"asked": str(dtype)[6:], "drafts": {}}
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
    plain: list[torch.Tensor] = []
    for draft in (*DRAFTS, head) if head else DRAFTS:
        try:
            if draft in (DRAFTS[0], head):  # the others draft for the target that is loaded
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


def run(name: str) -> list[dict[str, Any]]:
    """The rows of a format, by dtype."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            given = FORMATS[name][1](Path(folder, "target"))
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
    for name in args.formats or FORMATS:
        try:
            libraries = {package: version(package) for package in ("transformers", *FORMATS[name][0])}
        except PackageNotFoundError:
            print(f"{name}: not installed: pip install {' '.join(FORMATS[name][0])}", file=sys.stderr)
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:  # some libraries end their process
            try:
                rows = pool.submit(run, name).result()
            except BrokenProcessPool:
                rows = [{"asked": "any", "error": "it ended the process", "drafts": {}}]
        row = {"format": name, "versions": libraries, "torch": f"torch {torch.__version__}", "rows": rows}
        key = name, libraries["transformers"]
        others = [each for each in found if (each["format"], each["versions"]["transformers"]) != key]
        order = [*FORMATS]
        found = sorted([*others, row], key=lambda each: (order.index(each["format"]), each["versions"]["transformers"]))
        args.save(found)
    return found


def text_of(found: list[Made]) -> str:
    head = (
        f"`python benchmarks/run.py quantized`, run in several environments, with "
        f"{', '.join(sorted({row['torch'] for row in found}))}, and with transformers {USUAL} "
        f"where no other version is named: {len(PROMPTS)} prompts, {CALL['max_new_tokens']} tokens each, greedy, on a CPU. The "
        "target is the shipped one, padded to rows of 256 for most GGUF files; its weights are rounded without calibration. "
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

Every format whose libraries are in this environment is tried, each in a process of its own; for the others, the line that
installs them is printed. Rows are added to the file, or replace those of the same format and version of transformers. The
target is the shipped one, rounded without calibration; for GGUF's K formats, it is padded to rows of 256. Nothing is timed.
""",
    measure,
    options={"formats": ([], "to try, by name; all by default")},
    quick={"formats": ["torchao int8"]},
    sections=(Section("howto/quantize", "quantized"),),
    markdown=text_of,
)
