"""AssistedModelForCausalLM: load a pair, generate with it, report, save. The face of the package.

Preparation (ids, processors, criteria, cache) is the target's own GenerationMixin; only its sampling loop is replaced, in
a class derived from the target's that shares the target's attributes. The target's own class and state stay untouched.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import GenerateDecoderOnlyOutput

from . import drafters, lengths, zoo
from .adapters import base_path, has_adapter, require_in_layers, save_adapter
from .configuration import AssistedConfig
from .decoding import decode
from .drafters import Call, Drafter, DraftModel, Spec, Target
from .fused import fused
from .graphs import Graphs, Lease, require_mode
from .law import Law
from .lossy import LossyTypical
from .parts import unwrapped
from .quantization import memory_bytes, save_quantized
from .recurrent import has_uncounted_states, held, is_recurrent, slots_for
from .report import Recorder, Report
from .runtime import CachedModel, Masks
from .text import Text
from .trial import require_verifiable
from .vocabulary import find_tokenizer

__all__ = ["AssistedModelForCausalLM"]

_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "token",
    "trust_remote_code",
)
_OTHER_MODES = {  # and what stands for them here, where something does
    "assistant_model": "make the pair with draft=THE MODEL",
    "assistant_tokenizer": "make the pair with draft_tokenizer=",
    "assistant_early_exit": 'make the pair with draft="early-exit:LAYER"',
    "prompt_lookup_num_tokens": 'make the pair with draft="ngram"',
    "use_mtp": "leave it out",
    "custom_generate": "leave it out",
    "synced_gpus": "leave it out",
}
_SET_MODES = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")  # those that a GenerationConfig holds
_OTHER_SETTINGS = (  # of transformers' own drafting, without effect here
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "assistant_ensemble_weight",
    "max_matching_ngram_size",
)
_KINDS = 16  # of calls, whose measurements are remembered
_CACHES = ("past_key_values", "cache_params")
_TEXT_INPUTS = {"input_ids", "attention_mask", "logits_to_keep", "use_cache", "position_ids", *_CACHES}


class AssistedModelForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal LM with a draft: the same answers as the target alone, in fewer passes of the target.

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
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(
        self,
        config: AssistedConfig,
        target: PreTrainedModel,
        spec: Spec,
        drafter: Drafter,
        draft_length: lengths.DraftLength,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__(config)
        self.target = target
        self.draft_models = torch.nn.ModuleList(drafter.modules)  # registered, so that .to() and .eval() reach them
        self.spec = spec
        self.drafter = drafter
        self.draft_length = draft_length
        self.tokenizer = tokenizer
        self.name_or_path = target.name_or_path
        self.report: Report | None = None
        self.length: lengths.Length | None = None
        self._lengths: list[tuple[Any, lengths.Length]] = []  # of earlier calls, the latest last: what they measured
        self._recorded = Recorder()
        self._overridden: set[str] = set()  # settings of which was said that they do not hold
        self.fast = "auto"
        self.graphs = Graphs()
        self.training = target.training

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
                with its base model; or a saved pair.
            draft: what drafts: a Hub id, a folder, `"zoo:draft"`, `"self:nf4"`, or a spec object. Left out, a saved pair
                brings its own, and any other target drafts from its own text: `"suffix"`.
            draft_quantization: how a draft named by a path is quantized: a name of `assisted.quantization.NAMES` or a
                transformers quantization config.
            draft_length: when to stop drafting: "adaptive" (default; measures what pays on this machine, and decodes plainly
                where nothing does), a number of tokens, "confidence", "heuristic", "adaedl", or a policy object
                (`assisted.lengths`, `assisted.controller.Adaptive`).
            tokenizer: the target's, where it does not lie beside the model.
            draft_tokenizer: the draft's, where it does not lie beside the draft.
            fast: how passes of the models are run: "auto" (default) captures them in CUDA graphs on a CUDA device, and fuses
                layers and keeps wide weights in a second, faster layout on a CPU; "eager" runs the models as transformers
                wrote them, and copies nothing; "compile" also compiles them, which takes up to minutes before the first
                tokens. All give the same tokens in float32. See the page "How a pass is run".
            **kwargs: the target's `from_pretrained` (dtype, device_map, quantization_config, Hub arguments, ...). Hub
                arguments but `revision` and `subfolder` are used for the draft as well.

        Raises ValueError for models that do not fit together, OSError where nothing is found.
        """
        require_mode(fast)
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)) or not str(pretrained_model_name_or_path):
            raise ValueError(
                f"pretrained_model_name_or_path: {pretrained_model_name_or_path!r} is no path; give a Hub id or a folder, "
                "or wrap a model that is loaded with from_models"
            )
        path = zoo.resolve(str(pretrained_model_name_or_path))
        config = kwargs.pop("config", None)
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        for_adapter = {**hub, **(kwargs.get("adapter_kwargs") or {})}
        base = base_path(path, "target", **for_adapter)
        if config is None:
            config = AutoConfig.from_pretrained(base, **hub, **_only(kwargs, "subfolder", "code_revision"))
        saved = isinstance(config, AssistedConfig)
        policy = lengths.resolve(draft_length)
        if saved:
            folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, **_only(hub, *_SNAPSHOT)))
            path = str(folder / "target")
            base = base_path(path, "target", **for_adapter)
            if draft is None:
                draft = drafters.read(config.draft, folder)
            if draft_length is None:
                policy = lengths.from_dict(config.draft_length)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
        else:
            kwargs["config"] = config
        spec = _with_tokenizer(drafters.parse(draft, draft_quantization), tokenizer, draft_tokenizer)
        target = AutoModelForCausalLM.from_pretrained(path, *model_args, **_with_dtype(config, kwargs))
        found = tokenizer or find_tokenizer(path, **hub)
        if found is None and base != path:
            found = find_tokenizer(base, **hub)
        for_draft = _only(hub, *(name for name in hub if name != "revision"))
        return cls._assemble(target, spec, policy, found, path, for_draft, fast)

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
            target: a decoder-only causal LM.
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
        placed = {} if target.device.type == "cpu" else {"device_map": {"": target.device}}
        drafter = spec.load(Target(target, tokenizer, path), dtype=target.dtype, **placed, **hub)
        config = AssistedConfig(
            target=target.config,
            draft=drafters.written(spec),
            draft_length=lengths.to_dict(policy),
            architectures=[cls.__name__],
            dtype=target.dtype,
        )
        model = cls(config, target, spec, drafter, policy, tokenizer)
        model.fast = fast
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The target's forward."""
        return self.target(*args, **kwargs)

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
                no longer follows the target's law.

        Returns what plain `generate` returns; `self.report` says how.

        Raises ValueError, naming the argument, for what drafting cannot honour. Beam search and other modes that are not
        sampling or greedy run plainly, with a warning. A way to draft of transformers' that the model's own
        `generation_config` chooses (`prompt_lookup_num_tokens`) is not used, of which is warned once.
        """
        policy = self.draft_length if draft_length is None else lengths.resolve(draft_length)
        if assisted:
            _require_own_drafting({**_set_by(generation_config, self.generation_config), **kwargs})
        if lossy_typical is not None and not assisted:
            raise ValueError("lossy_typical: plain decoding accepts nothing; leave it out, or pass assisted=True")
        recorder = Recorder()
        call = _Call(self, policy, recorder, Lease(require_mode(self.fast)), lossy_typical)
        started = time.perf_counter()
        if assisted:
            token = _CALL.set(call)
            try:
                output = self._seam().generate(inputs, generation_config, **kwargs)
            finally:
                _CALL.reset(token)
                call.lease.over = True
            if not call.reached:
                _warn_plain("this generation mode is neither greedy nor sampling")
        else:
            output = self.target.generate(inputs, generation_config, **kwargs)
        if not recorder.row_tokens:
            prompt = inputs if inputs is not None else kwargs.get("input_ids")
            _count_plain(recorder, output, 0 if prompt is None else prompt.shape[1])
        recorder.seconds = time.perf_counter() - started
        self._recorded.add(recorder)
        self.report = recorder.report()
        return output

    @property
    def totals(self) -> Report:
        """Counts over all calls since the last `reset_totals`."""
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
        if has_adapter(self.target):
            save_adapter(self.target, folder / "target", "target", **kwargs)
        else:
            self.target.save_pretrained(folder / "target", **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder / "target")
        for name, drafter in drafters.with_heads(self.spec, self.drafter):
            drafter.save(folder / name)
        for name, spec, drafter in drafters.with_models(self.spec, self.drafter):
            by_path = isinstance(spec.model, str)
            source = zoo.resolve(spec.model) if by_path else None
            save_quantized(drafter.models[0] if by_path else spec.model, folder / name, source=source)
            tokenizer = drafter.tokenizer or self.tokenizer
            if tokenizer is not None:
                tokenizer.save_pretrained(folder / name)
        self.config.draft_length = lengths.to_dict(self.draft_length)
        self.config.save_pretrained(folder)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.name), **hub)

    @property
    def generation_config(self) -> GenerationConfig:
        """The target's."""
        return self.target.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        if "target" in self._modules:  # PreTrainedModel.__init__ sets a default before there is a target
            self.target.generation_config = value

    def get_input_embeddings(self) -> torch.nn.Module:
        """The target's."""
        return self.target.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        """The target's."""
        return self.target.get_output_embeddings()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The target's."""
        return self.target.prepare_inputs_for_generation(*args, **kwargs)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the target and the draft as they are stored; what they share counts once.

        return_buffers: whether buffers count, such as tables of positions.
        """
        return memory_bytes(self.target, *self.drafter.modules, buffers=return_buffers)

    def _start_length(self, policy: lengths.DraftLength, rows: int, do_sample: bool) -> lengths.Length:
        """The policy's memory for a call. It may build on what the last call of its kind measured: as many rows, greedy or
        sampled, on the same device."""
        kind = (policy, rows, do_sample, self.target.device)
        found = next((entry for entry in self._lengths if entry[0] == kind), None)
        length = self.drafter.start_length(policy, None if found is None else found[1])
        self._lengths = [*(entry for entry in self._lengths if entry is not found), (kind, length)][-_KINDS:]
        self.length = length
        return length

    def _warn_overridden(self, name: str, value: Any) -> None:
        """Say once what of the target's generation config does not hold here."""
        if name not in self._overridden:
            self._overridden.add(name)
            warnings.warn(
                f"generation_config.{name} = {value!r} is not used: it chooses a way to draft of transformers', and this "
                f"model drafts with {type(self.spec).__name__}. Instead: {_OTHER_MODES[name]}, or set it to None.",
                stacklevel=7,  # behind transformers' generate, in the caller's line
            )

    def _seam(self) -> Any:
        """The target under a class whose sampling loop is ours: another object with the same attributes."""
        owner = unwrapped(self.target)
        seam: Any = object.__new__(_seam_class(type(owner)))  # type: ignore[arg-type]
        seam.__dict__ = owner.__dict__
        return seam


def _set_by(given: GenerationConfig | None, own: GenerationConfig | None) -> dict[str, Any]:
    """What a caller's config sets of transformers' drafting. What the model's own config says as well was not decided for
    this call: pipelines pass on a copy of that."""
    names = (*_SET_MODES, *_OTHER_SETTINGS)
    values = {name: getattr(given, name, None) for name in names}
    return {name: value for name, value in values.items() if value != getattr(own, name, None)}


def _require_own_drafting(given: dict[str, Any]) -> None:
    """Refuse arguments that choose or set a way to draft of transformers', and those that go against this one."""
    for name, instead in _OTHER_MODES.items():
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name}: this model drafts in its own way; {instead}, or pass assisted=False")
    for name in _OTHER_SETTINGS:
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: a setting of transformers' own drafting, which does not run here; see draft_length and the "
                "draft specs, or pass assisted=False"
            )
    if given.get("position_ids") is not None:
        raise ValueError("position_ids: counted from attention_mask here; leave them out, or pass assisted=False")


@dataclass
class _Call:
    """What the seam needs to know of the `generate` it is in."""

    model: AssistedModelForCausalLM
    policy: lengths.DraftLength
    recorder: Recorder
    lease: Lease
    lossy: LossyTypical | None = None
    reached: bool = field(default=False)


_CALL: ContextVar[_Call] = ContextVar("assisted_call")
_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")


class _Seam:
    """Overrides the one method of GenerationMixin that loops over tokens, and where its settings come from."""

    @property
    def generation_config(self) -> GenerationConfig:
        """The target's: an adapter's wrapper may have one that the model within does not have."""
        return _CALL.get().model.generation_config

    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        """A way to draft of transformers' that the model's own config chooses gives way to this model's."""
        prepared, others = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        for name in _SET_MODES:
            value = getattr(prepared, name, None)
            if value is not None and value is not False:
                setattr(prepared, name, None)
                _CALL.get().model._warn_overridden(name, value)
        return prepared, others

    def _sample(
        self: Any,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        tokenizer: Any = None,  # of the stop strings, which have had it
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        call = _CALL.get()
        call.reached = True
        reason = _must_be_plain(generation_config)
        if reason is not None:
            _warn_plain(reason)
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        given = _require_usable(input_ids, model_kwargs)
        details = bool(generation_config.return_dict_in_generate)
        wanted = details or getattr(given, "_is_user_defined", False)
        # Inside, tensors are cheaper to make; whatever leaves is copied outside, where it is an ordinary tensor.
        with torch.inference_mode(), self._optimize_model_for_decode():
            text, target = _extend(
                self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, given, model_kwargs
            )
            if wanted:
                _read_to_the_end(target, text)
        if streamer is not None:
            streamer.end()
        if wanted:
            windowed = given.layer_class_to_replicate is None
            given.layers = target.cache.to_dynamic(
                self.config.get_text_config(decoder=True) if windowed else None
            ).layers
        if not details:
            return text.output()
        return GenerateDecoderOnlyOutput(
            sequences=text.output(),
            scores=text.stacked(text.scores) if text.keep_scores else None,
            logits=text.stacked(text.logits) if text.keep_logits else None,
            past_key_values=given,
        )


def _extend(
    seam: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    given: DynamicCache,
    model_kwargs: dict[str, Any],
) -> tuple[Text, CachedModel]:
    """Read the prompt and run the loop. Returns the finished text and the target with the KV of it."""
    call = _CALL.get()
    if is_recurrent(seam):
        require_verifiable(seam)  # again, for a target that was moved or cast
    masks = Masks.of(seam)
    attention_mask = model_kwargs.get("attention_mask")
    law = Law(logits_processor, generation_config.do_sample, call.lossy)
    pad = generation_config._pad_token_tensor
    details = generation_config.return_dict_in_generate
    text = Text(
        input_ids,
        stopping_criteria,
        None if pad is None else int(pad),
        streamer,
        keep_scores=bool(details and generation_config.output_scores),
        keep_logits=bool(details and generation_config.output_logits),
    )
    cache = slots_for(seam, given, text.rows, text.max_length + held(given), masks)
    cache.hide(attention_mask)
    model_kwargs[_cache_name(model_kwargs)] = cache
    length = call.model._start_length(call.policy, text.rows, law.do_sample)
    drafter = call.model.drafter
    target = drafter.run_target(fused(seam) if call.lease.fuses else seam, cache, masks)
    target.lease = call.lease
    if law.lossy is not None:
        _require_possible(law, text, target)
    call.model.graphs.serve(target, seam, call.lease)
    started = time.perf_counter()
    logits = _read_prompt(target, input_ids, generation_config, model_kwargs)
    cache.begin_rounds(input_ids.shape[1])
    call.recorder.verify_seconds = time.perf_counter() - started
    own_mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
    drafting = drafter.start(Call(own_mask, law.for_draft(), length, text.max_length, target, call.lease))
    decode(target, drafting, text, law, length, logits, call.recorder)
    call.recorder.row_tokens = list(text.row_tokens)
    call.recorder.predicted_speedup = length.predicted_speedup
    return text, target


@functools.cache
def _seam_class(target_class: Any) -> type:
    return type(target_class.__name__, (_Seam, target_class), {"__module__": target_class.__module__})


def _read_prompt(
    target: CachedModel, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> torch.Tensor:
    """The logits after the prompt, [B, 1, V], read the way the target's own `generate` reads it."""
    seam: Any = target.model

    tensors = {name: value for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
    by_column = all(tensor.shape[:2] == input_ids.shape for tensor in tensors.values())

    def read(rows: list[int], first: int) -> torch.Tensor:
        part: dict[str, Any] = {n: tensor[rows, first:] for n, tensor in tensors.items()} if by_column else {}
        if target.last_only:
            part["last_only"] = True
        output = seam._prefill(input_ids[rows, first:], generation_config, {**model_kwargs, **part})
        return output.logits[:, -1:].to(input_ids.device)

    try:
        if not by_column:  # a caller's past, whose mask is longer
            return read(list(range(len(input_ids))), 0)
        return target.by_groups(input_ids.shape[1], read)
    except IndexError as error:
        limit = getattr(seam.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is not None and input_ids.shape[1] > limit:
            raise ValueError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, the target's context ends at {limit}"
            ) from error
        raise


def _require_possible(law: Law, text: Text, target: CachedModel) -> None:
    """Refuse a lossy rule where it would have no meaning, or would see rows in step."""
    if not law.do_sample:
        raise ValueError(
            "lossy_typical: greedy decoding has one token that is right; pass do_sample=True, or leave it out"
        )
    if law.in_order or text.in_step or (target.in_step and text.rows > 1):
        raise ValueError(
            "lossy_typical: not with logits processors, criteria or streamers that have to see every token of a batch in "
            "turn, nor with batches of recurrent models; leave it out"
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


def _must_be_plain(generation_config: GenerationConfig) -> str | None:
    """Why a call cannot be assisted although its result can be had plainly."""
    if generation_config.use_cache is False:
        return "use_cache=False leaves no cache to rewind"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                return f"{name}=True asks for the states of one-token passes"
    return None


def _require_usable(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> DynamicCache:
    """Refuse what drafting cannot honour. Returns the caller's cache, or the empty one that `generate` made."""
    for name, value in model_kwargs.items():
        if name not in _TEXT_INPUTS and value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}: only text can be assisted (input_ids and attention_mask); pass assisted=False")
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids: the prompt is empty; give at least one token, such as the tokenizer's bos_token")
    name = _cache_name(model_kwargs)
    cache = model_kwargs.get(name)
    if cache is None or type(cache) is not DynamicCache or cache.offloading:
        raise ValueError(
            f"{name}: a {type(cache).__name__} cannot be rewound here; pass a DynamicCache (or no "
            "cache_implementation), or assisted=False"
        )
    if has_uncounted_states(cache):
        raise ValueError(
            f"{name}: states without keys and values don't say how many tokens they have read; pass the whole text as "
            "input_ids and no cache, or assisted=False"
        )
    return cache


def _cache_name(model_kwargs: dict[str, Any]) -> str:
    """What `generate` calls the cache of this model."""
    return next((name for name in _CACHES if model_kwargs.get(name) is not None), _CACHES[0])


def _read_to_the_end(target: CachedModel, text: Text) -> None:
    """Let every row hold the KV that plain `generate` leaves to a caller: of a row that ended early, its end token and
    the padding behind it."""
    target.catch_up()
    target.run_only(list(range(text.rows)))
    cache, shortest, longest = target.cache, min(text.lengths), max(text.lengths)
    if shortest < longest:
        cache.rewind([known - length + shortest for known, length in zip(cache.known, text.lengths, strict=True)])
        target(text.output()[:, shortest - 1 : longest - 1])
        cache.commit([longest - shortest] * text.rows)


def _count_plain(recorder: Recorder, output: Any, prompt_length: int) -> None:
    """What is known of a plain run: a pass for every token, the first of which comes with the prompt."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    rows, new = sequences.shape[0], sequences.shape[1] - prompt_length
    recorder.row_tokens = [new] * rows
    recorder.target_passes = rows * (new - 1)


def _warn_plain(reason: str) -> None:
    warnings.warn(f"Decoding plainly, without drafts: {reason}.", stacklevel=3)


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


AutoConfig.register("assisted", AssistedConfig)
AutoModelForCausalLM.register(AssistedConfig, AssistedModelForCausalLM)
