"""AssistedModelForCausalLM: load a pair, generate with it, report, save. The face of the package."""

from __future__ import annotations

import copy
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import GenerateDecoderOnlyOutput

from . import drafters, lengths, zoo
from .admission import MIXED, OTHER_MODES, require_own_drafting, warn_plain
from .configuration import AssistedConfig
from .drafters import Drafter, DraftModel, Spec, Target
from .drafts import Round
from .engine.parts import device_of, uncompiled
from .engine.verifiable import require_verifiable
from .fast.graphs import CallSettings, Graphs, require_mode
from .forwarding import ForwardsToTarget
from .generation import CALL, HookedCall, hooked
from .loading.adapters import base_path, has_adapter, require_in_layers, save_adapter, trusting
from .loading.checkpoints import write_index
from .loading.files import inside, loading, require_sound
from .loading.gguf import load_gguf, named_in, read_config, unmarked
from .loading.quantization import copy_shells, memory_bytes
from .loading.vocabulary import find_tokenizer
from .lossy import LossyTypical
from .report import Recorder, Report

__all__ = ["AssistedModelForCausalLM"]

_KINDS = 16  # of calls, whose measurements are remembered
_BOOKS = threading.Lock()  # what calls in several threads leave to a model
_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "token",
    "trust_remote_code",
)


class AssistedModelForCausalLM(ForwardsToTarget):
    """A causal LM with a draft: the same answers as the target alone, in fewer passes of the target.

    In everything else it is the target: its modules, weights, hooks and methods, read and changed through this object.

    Attributes:
        target: the target model, as it was given or loaded.
        drafter: what drafts for it.
        report: what the last `generate` did, None before the first.
        totals: the same over all calls since `reset_totals`.
        length: the draft length policy at work in the last `generate`; `length.costs` is what it measured.
        fast: how passes are run, see `from_pretrained`; may be set at any time.
        graphs: the captured passes of the target.
    """

    config_class = AssistedConfig

    def __init__(
        self,
        config: AssistedConfig,
        target: PreTrainedModel,
        spec: Spec,
        drafter: Drafter,
        draft_length: lengths.DraftLength,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__(target)
        self.config = config
        self.spec = spec
        self.drafter = drafter
        self.draft_length = draft_length
        self.tokenizer = tokenizer
        self.report: Report | None = None
        self.length: lengths.Length | None = None
        self._lengths: list[tuple[Any, lengths.Length]] = []  # of earlier calls, the latest last: what they measured
        self._recorded = Recorder()
        self._overridden: set[str] = set()  # settings of which was said that they do not hold
        self.watch: Callable[[Round], None] | None = None
        self.fast = "auto"
        self.graphs = Graphs()
        self.made()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made from: all but what calls have left behind. A copy measures for itself."""
        return {**self.__dict__, "length": None, "_lengths": [], "watch": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> AssistedModelForCausalLM:
        """A pair of copies, which share nothing with these."""
        other = memo[id(self)] = type(self).__new__(type(self))
        copy_shells(memo, self.target, *self.drafter.modules)
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        draft: Any = None,
        draft_quantization: Any = None,
        draft_length: int | str | lengths.DraftLength | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        fast: str = "auto",
        **kwargs: Any,
    ) -> AssistedModelForCausalLM:
        """Load a target and a draft, or a folder that `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: Hub id, folder or `zoo:` name of the target, or of a PEFT adapter, which is loaded
                with its base model; or a GGUF file; or a saved pair.
            draft: what drafts: a Hub id, a folder, `"zoo:draft"`, `"self:nf4"`, or a spec object. Left out, a saved pair
                brings its own, and any other target drafts from its own text: `"suffix"`.
            draft_quantization: how a draft named by a path is quantized: a name of `assisted.loading.quantization.NAMES` or a
                transformers quantization config.
            draft_length: when to stop drafting: "adaptive" (default; measures what pays on this machine, and decodes plainly
                where nothing does), a number of tokens, "confidence", "heuristic", "adaedl", or a policy object
                (`assisted.lengths`, `assisted.lengths.Adaptive`).
            tokenizer: the target's, where it does not lie beside the model.
            draft_tokenizer: the draft's, where it does not lie beside the draft.
            fast: how passes of the models are run: "auto" (default) captures them in CUDA graphs on a CUDA device, and fuses
                layers and keeps wide weights in a second, faster layout on a CPU; "eager" runs the models as transformers
                wrote them, and copies nothing; "compile" also compiles them, which takes up to minutes before the first
                tokens. All give the same tokens in float32. See the page "How a pass is run".
            **kwargs: the target's `from_pretrained` (dtype, device_map, quantization_config, Hub arguments, ...). Hub
                arguments but `revision` and `subfolder` are used for the draft as well. `gguf_file` names the target's GGUF
                file in a folder or Hub repository; its weights are unpacked.

        `trust_remote_code=True` holds for what the call names: the target, a saved pair's `target/`, and what `draft=` names.
        It never reaches a model that only a file names: the draft of a saved pair (to trust it, name it:
        `draft="FOLDER/draft"`) and the base model of an adapter (load both with peft, and take `from_models`).

        Raises ValueError for models that do not fit together, and for files that are there and broken, naming the file and,
        where it is known, the field; OSError where nothing is found.
        """
        require_mode(fast)
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)) or not str(pretrained_model_name_or_path):
            raise ValueError(
                f"pretrained_model_name_or_path: {pretrained_model_name_or_path!r} is no path; give a Hub id or a folder, "
                "or wrap a model that is loaded with from_models"
            )
        path, gguf_file = zoo.resolve(str(pretrained_model_name_or_path)), kwargs.pop("gguf_file", None)
        if gguf_file is None:
            path, gguf_file = named_in(path)
        config = kwargs.pop("config", None)
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        for_adapter = {**hub, **(kwargs.get("adapter_kwargs") or {})}
        if gguf_file is None:
            require_sound(path, "target")
        with loading("target", path):
            base = base_path(path, "target", **for_adapter)
            own = trusting(path, base, **hub, **_only(kwargs, "subfolder", "code_revision"))
            if gguf_file is not None:
                config = read_config(base, gguf_file, config, **own)
            elif config is None:
                config = AutoConfig.from_pretrained(base, **own)
        saved = isinstance(config, AssistedConfig)
        policy, is_named = lengths.resolve(draft_length), True
        if saved:
            folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, **_only(hub, *_SNAPSHOT)))
            path = str(inside(folder, "target", "target"))
            require_sound(path, "target")
            base = base_path(path, "target", **for_adapter)
            if draft is None:
                draft, is_named = drafters.read(config.draft, folder), False
            if draft_length is None:
                policy = lengths.from_dict(config.draft_length)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
        else:
            kwargs["config"] = config
        spec = _with_tokenizer(drafters.parse(draft, draft_quantization), tokenizer, draft_tokenizer)
        kwargs = trusting(path, base, **_with_dtype(config, kwargs))
        of_file: dict[str, Any] = {}
        if gguf_file is not None:
            target = load_gguf(path, gguf_file, "target", *model_args, **kwargs)
            of_file = {"gguf_file": gguf_file, **_only(kwargs, "subfolder")}
        else:
            with loading("target", path):
                target = AutoModelForCausalLM.from_pretrained(path, *model_args, **kwargs)
        found = tokenizer or find_tokenizer(path, **hub, **of_file)
        if found is None and base != path:
            found = find_tokenizer(base, **trusting(path, base, **hub))
        for_draft = _only(hub, *(name for name in hub if name != "revision"))
        if is_named:
            return cls._assemble(target, spec, policy, found, path, for_draft, fast)
        with loading("draft", folder):
            return cls._assemble(target, spec, policy, found, path, for_draft | {"trust_remote_code": False}, fast)

    @classmethod
    def from_models(
        cls,
        target: PreTrainedModel,
        draft: Any = None,
        draft_length: int | str | lengths.DraftLength | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        draft_quantization: Any = None,
        fast: str = "auto",
    ) -> AssistedModelForCausalLM:
        """Wrap models that are already loaded. Neither is changed.

        Args:
            target: a decoder-only causal LM. One that `torch.compile` returned is taken without it: `fast="compile"` compiles
                what is run here.
            draft: a causal LM, with a PEFT adapter around it or without, or anything that `from_pretrained` takes as draft.
            draft_length: as for `from_pretrained`.
            tokenizer: the target's. With the draft's it tells a padded vocabulary from another one, and translates.
            draft_tokenizer: the draft's.
            draft_quantization: as for `from_pretrained`.
            fast: as for `from_pretrained`.

        Raises ValueError for models that do not fit together.
        """
        if not hasattr(target, "forward"):
            raise ValueError(
                f"target: a loaded causal LM is expected, got {target!r}; from_pretrained takes Hub ids and folders"
            )
        target = uncompiled(target)
        if getattr(target, "_compiled_call_impl", None) is not None:
            warnings.warn(
                "target: it was compiled in place (target.compile()), and is compiled again for every width of a pass that "
                'drafting brings. Leave that out: fast="compile" compiles what is run here.',
                stacklevel=2,
            )
        spec = _with_tokenizer(drafters.parse(draft, draft_quantization), tokenizer, draft_tokenizer)
        folder = target.name_or_path if Path(target.name_or_path or "-").is_dir() else None
        return cls._assemble(
            target,
            spec,
            lengths.resolve(draft_length),
            tokenizer or find_tokenizer(folder),
            folder,
            {},
            require_mode(fast),
        )

    @classmethod
    def _assemble(
        cls,
        target: PreTrainedModel,
        spec: Spec,
        policy: lengths.DraftLength,
        tokenizer: PreTrainedTokenizerBase | None,
        path: str | None,
        hub: dict[str, Any],
        fast: str,
    ) -> AssistedModelForCausalLM:
        require_in_layers(target, "target")
        require_verifiable(target)
        device = device_of(target)
        placed = {} if device.type == "cpu" else {"device_map": {"": device}}
        drafter = spec.load(Target(target, tokenizer, path), dtype=target.dtype, **placed, **hub)
        config = AssistedConfig(
            target=target.config,
            draft=spec.written("draft"),
            draft_length=lengths.to_dict(policy),
            architectures=[
                AutoModelForCausalLM.__name__
            ],  # a name that is looked up in transformers, by its server as well
            dtype=target.dtype,
        )
        model = cls(config, target, spec, drafter, policy, tokenizer)
        model.fast = fast
        return model

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        draft_length: int | str | lengths.DraftLength | None = None,
        assisted: bool = True,
        lossy_typical: LossyTypical | None = None,
        **kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """As the target's `generate`, in fewer of its passes.

        Args:
            inputs, generation_config, **kwargs: everything that plain `generate` takes.
            draft_length: for this call, instead of the model's.
            assisted: False decodes plainly, through the target's own `generate`.
            lossy_typical: when sampling, accept what is typical of the target (Medusa's rule). Faster, and NOT exact: the text
                no longer follows the target's distribution.

        Returns what plain `generate` returns; `self.report` says how.

        Raises ValueError, naming the argument, for what drafting cannot honour. Beam search and other modes that are not
        sampling or greedy run plainly, with a warning. A way to draft of transformers' that the model's own
        `generation_config` chooses (`prompt_lookup_num_tokens`) is not used, of which is warned once.
        """
        policy = self.draft_length if draft_length is None else lengths.resolve(draft_length)
        if assisted:
            require_own_drafting(generation_config, self.generation_config, kwargs)
        if lossy_typical is not None and not assisted:
            raise ValueError("lossy_typical: plain decoding accepts nothing; leave it out, or pass assisted=True")
        if assisted and kwargs.get("adapter_names") is not None:
            warn_plain(MIXED)
            assisted = False
        recorder = Recorder(self.watch)
        settings = CallSettings(require_mode(self.fast))
        lengths_started: list[tuple[Any, lengths.Length]] = []
        start_length = functools.partial(self._start_length, policy, lengths_started)
        call = HookedCall(self, start_length, self._warn_overridden, recorder, settings, lossy_typical)
        started = time.perf_counter()
        if assisted:
            token = CALL.set(call)
            try:
                output = hooked(self.target).generate(inputs, generation_config, **kwargs)
            finally:
                CALL.reset(token)
                call.settings.over = True
                for _, length in lengths_started:
                    length.end()
            if not call.reached:
                warn_plain("this generation mode is neither greedy nor sampling")
        else:
            output = self.target.generate(inputs, generation_config, **kwargs)
        if not recorder.row_tokens:
            prompt = inputs if inputs is not None else kwargs.get("input_ids")
            _count_plain(recorder, output, 0 if prompt is None else prompt.shape[1])
        recorder.seconds = time.perf_counter() - started
        with _BOOKS:
            self._recorded.add(recorder)
            for kind, length in lengths_started:
                self._lengths = [*(entry for entry in self._lengths if entry[0] != kind), (kind, length)][-_KINDS:]
        self.report = recorder.report()
        return output

    @property
    def totals(self) -> Report:
        """Counts over all calls since the last `reset_totals`."""
        with _BOOKS:
            return self._recorded.report()

    def reset_totals(self) -> None:
        """Start counting anew."""
        self._recorded = Recorder()

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:  # type: ignore[override]
        """Write one folder: `target/`, `draft/` (where a model drafts), and config.json, which says how they go together.

        save_directory: the folder. kwargs: the target's `save_pretrained`, or `push_to_hub`'s.

        Of a model with a PEFT adapter the adapter is written, which names its base model. Raises ValueError where that would
        not be read back.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        hub = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private", "token") if name in kwargs}
        target = self.target
        if has_adapter(target):
            save_adapter(target, folder / "target", "target", **kwargs)
        else:
            target = unmarked(target)
            target.save_pretrained(folder / "target", **kwargs)
        if kwargs.get("is_main_process") is False:
            return
        write_index(folder, "target")
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder / "target")
        self.spec.save(self.drafter, folder / "draft", self.tokenizer)
        self.config.draft_length = lengths.to_dict(self.draft_length)
        config = copy.copy(self.config)
        if target is not self.target:
            config.target = target.config
        config.save_pretrained(folder)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.name), **hub)

    def _apply(self, fn: Any, recurse: bool = True) -> AssistedModelForCausalLM:
        """What moves or casts the target moves and casts the draft."""
        super()._apply(fn, recurse)
        for module in self.drafter.modules:
            module._apply(fn, recurse)
        return self

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the target and the draft as they are stored; what they share counts once.

        return_buffers: whether buffers count, such as tables of positions.
        """
        return memory_bytes(self.target, *self.drafter.modules, buffers=return_buffers)

    def _start_length(
        self,
        policy: lengths.DraftLength,
        started: list[tuple[Any, lengths.Length]],
        rows: int,
        do_sample: bool,
    ) -> lengths.Length:
        """The policy's memory for a call, added to `started` with its kind. It may build on what the last call of its kind
        measured that is over: as many rows, greedy or sampled, on the same device."""
        kind = (policy, rows, do_sample, self.target.device)
        found = next((entry for entry in self._lengths if entry[0] == kind), None)
        length = self.drafter.start_length(policy, None if found is None else found[1])
        started.append((kind, length))
        self.length = length
        return length

    def _warn_overridden(self, name: str, value: Any) -> None:
        """Say once what of the target's generation config does not hold here."""
        if name not in self._overridden:
            self._overridden.add(name)
            warnings.warn(
                f"generation_config.{name} = {value!r} is not used: it chooses a way to draft of transformers', and this "
                f"model drafts with {type(self.spec).__name__}. Instead: {OTHER_MODES[name]}, or set it to None.",
                stacklevel=7,  # behind transformers' generate, in the caller's line
            )


def _with_tokenizer(spec: Spec, tokenizer: Any, draft_tokenizer: Any) -> Spec:
    """A spec with the tokenizer that was given for its model. Raises ValueError for one that nobody would ask."""
    for name, given in (("tokenizer", tokenizer), ("draft_tokenizer", draft_tokenizer)):
        if given is not None and not hasattr(given, "get_vocab"):
            raise ValueError(f"{name}: {given!r} is no tokenizer; pass AutoTokenizer.from_pretrained(...)")
    if draft_tokenizer is None:
        return spec
    if not isinstance(spec, DraftModel):
        raise ValueError(
            f"draft_tokenizer: {type(spec).__name__} is not one model that could have it; leave it out, or, in a list, write "
            "DraftModel(PATH, tokenizer=...)"
        )
    return DraftModel(spec.model, spec.quantization, draft_tokenizer)


def _count_plain(recorder: Recorder, output: Any, prompt_length: int) -> None:
    """What is known of a plain run: a pass for every token, the first of which comes with the prompt."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    rows, new = sequences.shape[0], sequences.shape[1] - prompt_length
    recorder.row_tokens = [new] * rows
    recorder.target_passes = rows * (new - 1)


def _with_dtype(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Left out, dtype is half precision on an accelerator, the checkpoint's own on a CPU."""
    if kwargs.get("dtype") is not None or kwargs.get("torch_dtype") is not None:
        return kwargs
    dtype: Any = "auto"
    if kwargs.get("device_map") is not None and torch.cuda.is_available():
        own = config.get_text_config(decoder=True).dtype
        if own not in (torch.float16, torch.bfloat16):
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return {**kwargs, "dtype": dtype}


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


# assisted/__init__.py may have named them to transformers already
AutoConfig.register("assisted", AssistedConfig, exist_ok=True)
AutoModelForCausalLM.register(AssistedConfig, AssistedModelForCausalLM, exist_ok=True)
