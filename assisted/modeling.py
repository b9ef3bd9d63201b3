"""AssistedModelForCausalLM: load a pair, generate with it, report, save. The main class of the package."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
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
from .admission import (
    MIXED,
    OTHER_MODES,
    Asked,
    asked_for,
    beside_text,
    mask_of,
    padding_at_end,
    require_numbers,
    require_own_drafting,
    require_tensors,
    setting_of,
    warn_plain,
    without,
)
from .configuration import AssistedConfig
from .drafters import Drafter, DraftModel, Spec, Target
from .drafts import Round
from .engine.clock import now
from .engine.experts import growth
from .engine.hooks import is_offloaded
from .engine.host import processor
from .engine.libraries import CACHE, with_cache_renamed
from .engine.parts import device_of, uncompiled, unwrapped
from .engine.pool import SessionPool, require_pool
from .engine.prepared import CallSettings
from .engine.ranks import Ranks, ranks_of
from .engine.rope import change_of
from .engine.session import Session, using
from .engine.traits import Traits
from .engine.trust import blamed
from .engine.verifiable import obstacle_to_reading_on, require_verifiable
from .fast.graphs import Graphs, require_mode
from .forwarding import ForwardsToTarget
from .generation import Generation, read_plainly
from .lengths import remembered
from .loading.adapters import base_path, has_adapter, outside_layers, require_in_layers, save_adapter, trusting
from .loading.backends.quanto import copy_shells
from .loading.classes import auto_class
from .loading.files import copy_processor, inside, loading, require_sound, write_index
from .loading.gguf import named_in, place_of, read_config, reading_once, unmarked
from .loading.names import DTYPES, closest
from .loading.quantization import load_from_gguf, memory_bytes, save_target, with_recorded
from .loading.vocabulary import find_tokenizer
from .lossy import LossyTypical
from .many import Answer, Preparation, generate_many
from .report import Recorder, Report

__all__ = ["AssistedModelForCausalLM"]

_OTHERS = 2  # drafts of single calls that are kept
_FEW = 4  # drafted tokens, over which the cost of a further position is averaged until it is measured
_KINDS = 16  # kinds of calls whose measurements are kept
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ALIKE = 0.8  # of 1: a name this similar to an argument is taken for a misspelling
_BOOKS = threading.Lock()  # guards what calls in several threads write to a model
_CONTINUOUS = "continuous batching runs the target's own loop over all requests"
_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_HUB_ARGUMENTS = (*_SNAPSHOT, "proxies", "trust_remote_code")


class AssistedModelForCausalLM(ForwardsToTarget):
    """A causal LM or an encoder-decoder, with a draft: the target's own output, in fewer of its forward passes.

    In everything else it is the target: this object reads and changes the target's modules, weights, hooks and methods.

    Attributes:
        target: the target model, as it was given or loaded.
        drafter: the drafter.
        report: counts and times of the last `generate`, None before the first.
        totals: the same over all calls since `reset_totals`.
        length: the draft length of the last `generate`; `length.costs` are its measured costs.
        fast, exact: how forward passes run and how exactly, see `from_pretrained`; may be set at any time.
        sessions: what earlier calls have read, see `from_pretrained`; may be set at any time.
        graphs: the captured forward passes of the target.
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
        self._lengths: list[tuple[Any, lengths.Length]] = []  # of earlier calls, latest last, with their measurements
        self._recorded = Recorder()
        self._running: Recorder | None = None
        self._costs_keys: dict[Any, str] = {}
        self._warned: set[str] = set()  # what was warned of once
        self.other_pairs: dict[
            Any, tuple[Asked, AssistedModelForCausalLM]
        ] = {}  # with drafts of single calls, latest last
        self._drafts_with: str | None = None  # of one of these
        self.watch: Callable[[Round], None] | None = None
        self.fast = "auto"
        self.exact: str | None = None
        self.sessions: SessionPool | None = None
        self.graphs = Graphs()
        self.made()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy: everything but the results of calls. A copy measures for itself."""
        fresh: dict[str, Any] = {
            "length": None,
            "_lengths": [],
            "_costs_keys": {},
            "watch": None,
            "_running": None,
            "other_pairs": {},
            "sessions": None,
        }
        return self.__dict__ | fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> AssistedModelForCausalLM:
        """A pair of copies, which share nothing with the originals."""
        other = memo[id(self)] = type(self).__new__(type(self))
        copy_shells(memo, self.target, *self.drafter.modules)
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    @classmethod
    @reading_once()
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        draft: Any = None,
        draft_quantization: Any = None,
        draft_window: int | None = None,
        draft_length: int | str | lengths.DraftLength | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        fast: str = "auto",
        exact: str | None = None,
        sessions: SessionPool | None = None,
        **kwargs: Any,
    ) -> AssistedModelForCausalLM:
        """Load a target and a draft, or a folder that `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: Hub id, folder or `zoo:` name of the target, or of a PEFT adapter, which is loaded
                with its base model; or a GGUF file; or a saved pair.
            draft: a Hub id, a folder, `"zoo:draft"`, `"self:nf4"`, or a spec object. By default a saved pair uses its own
                draft, and any other target drafts from its own text: `"suffix"`.
            draft_quantization: how a draft named by a path is quantized: a name of `assisted.loading.quantization.NAMES` or a
                transformers quantization config.
            draft_window: how many of the last tokens the draft keeps keys and values of, which bounds its memory; default: all.
                See `DraftModel`.
            draft_length: when to stop drafting: "adaptive" (default; measures costs on this machine, and disables drafting
                whenever it does not pay off), a number of tokens, "confidence", or a policy object
                (`assisted.lengths`, `assisted.lengths.Adaptive`).
            tokenizer: the target's, if its folder has none.
            draft_tokenizer: the draft's, if its folder has none.
            fast: how forward passes run: "auto" (default) captures them in CUDA graphs on a CUDA device; on a CPU it fuses
                layers and keeps wide weights in a second, faster layout. "eager" runs the models as transformers wrote them,
                and copies nothing. "compile" also compiles them, which takes up to minutes before the first tokens. All give
                the same tokens in float32. See the page "How a forward pass is run".
            exact: None (default): drafts change text in half precision only where rounding decides. "bits": they change no bit
                of tokens and logits, and sampled text equals the text of the same seed without drafts. For models of the Llama
                family, on CPUs and CUDA devices.
            sessions: a `SessionPool`, in which prompts find what earlier calls have read of the same beginning. By default,
                every call reads its whole prompt.
            **kwargs: the target's `from_pretrained` (dtype, device_map, quantization_config, Hub arguments, ...). Hub
                arguments except `revision` and `subfolder` also apply to the draft. `gguf_file` names the target's GGUF
                file in a folder or Hub repository; its weights are unpacked. `assistant_model` and `assistant_tokenizer` are
                other names of `draft` and `draft_tokenizer`.

        `trust_remote_code=True` applies to the models that the call names: the target, a saved pair's `target/`, and the draft
        of `draft=`. It never applies to a model that only a file names: the draft of a saved pair (to trust it, name it:
        `draft="FOLDER/draft"`) and the base model of an adapter (load both with peft, and use `from_models`).

        Raises ValueError for models that do not fit together, and for broken files, with the name of the file and, if known,
        of the field; OSError if nothing is found.
        """
        _require_known(kwargs, cls.from_pretrained)
        draft = _one_of("draft", draft, kwargs.pop("assistant_model", None))
        draft_tokenizer = _one_of("draft_tokenizer", draft_tokenizer, kwargs.pop("assistant_tokenizer", None))
        require_mode(fast, exact)
        require_pool(sessions)
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)) or not str(pretrained_model_name_or_path):
            raise ValueError(
                f"pretrained_model_name_or_path: {pretrained_model_name_or_path!r} is not a path; give a Hub id or a folder, "
                "or wrap a loaded model with from_models"
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
        spec = _with_tokenizer(drafters.parse(draft, draft_quantization, draft_window), tokenizer, draft_tokenizer)
        kwargs = trusting(path, base, **_with_dtype(config, kwargs))
        of_file, origin = dict[str, Any](), path
        if gguf_file is not None:
            target = load_from_gguf(path, gguf_file, *model_args, **kwargs)
            of_file = {"gguf_file": gguf_file, **_only(kwargs, "subfolder")}
            origin = place_of(path, gguf_file, kwargs)
        else:
            with loading("target", path):
                kind, own = auto_class(config.target if saved else config), _only(kwargs, "trust_remote_code")
                kwargs = with_recorded(AutoConfig.from_pretrained(base, **own) if saved else config, kwargs)
                target = kind.from_pretrained(path, *model_args, **kwargs)
        side = _padding_side(target)
        found = tokenizer or find_tokenizer(path, **hub, **of_file, **side)
        if found is None and base != path:
            found = find_tokenizer(base, **trusting(path, base, **hub), **side)
        for_draft = _only(hub, *(name for name in hub if name != "revision"))
        with nullcontext() if is_named else loading("draft", folder):
            for_draft |= {} if is_named else {"trust_remote_code": False}
            model = cls._assemble(target, spec, policy, found, origin, for_draft, fast, exact)
        model.sessions = sessions
        return model

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
        exact: str | None = None,
        draft_window: int | None = None,
        sessions: SessionPool | None = None,
    ) -> AssistedModelForCausalLM:
        """Wrap models that are already loaded. Neither is changed.

        Args:
            target: a causal LM, also one that reads images, or an encoder-decoder. A result of `torch.compile` is unwrapped:
                `fast="compile"` compiles the forward passes that run here.
            draft: a causal LM, with a PEFT adapter or without, or anything that `from_pretrained` takes as draft.
            draft_length: as for `from_pretrained`.
            tokenizer: the target's. With both tokenizers, the pair distinguishes a padded vocabulary from a different one, and
                translates tokens between different ones.
            draft_tokenizer: the draft's.
            draft_quantization, fast, exact, draft_window, sessions: as for `from_pretrained`.

        Raises ValueError for models that do not fit together.
        """
        if not hasattr(target, "forward"):
            raise ValueError(
                f"target: a loaded causal LM is expected, got {target!r}; from_pretrained takes Hub ids and folders"
            )
        target = uncompiled(target)
        if getattr(target, "_compiled_call_impl", None) is not None:
            warnings.warn(
                "target: it was compiled in place (target.compile()), so each number of drafted tokens compiles it again. "
                'Leave that out: fast="compile" compiles the forward passes that run here.',
                stacklevel=2,
            )
        spec = _with_tokenizer(drafters.parse(draft, draft_quantization, draft_window), tokenizer, draft_tokenizer)
        folder = target.name_or_path if Path(target.name_or_path or "-").is_dir() else None
        require_pool(sessions)
        policy, tokenizer = lengths.resolve(draft_length), tokenizer or find_tokenizer(folder, **_padding_side(target))
        model = cls._assemble(target, spec, policy, tokenizer, folder, {}, require_mode(fast, exact), exact)
        model.sessions = sessions
        return model

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
        exact: str | None,
    ) -> AssistedModelForCausalLM:
        require_in_layers(target, "target")
        require_verifiable(target)
        device = device_of(target)
        placed = {} if device.type == "cpu" else {"device_map": {"": device}}
        about = Target(target, tokenizer, path)
        spec = spec.chosen(about)
        drafters.require_fitting(spec, target)
        drafter = spec.load(about, dtype=target.dtype, **placed, **hub)
        config = AssistedConfig(
            target=target.config,
            draft=spec.written("draft"),
            draft_length=lengths.to_dict(policy),
            architectures=[AutoModelForCausalLM.__name__],  # transformers and its server look this name up
            dtype=target.dtype,
        )
        model = cls(config, target, spec, drafter, policy, tokenizer)
        model.fast, model.exact = fast, exact
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
        sessions: SessionPool | None = None,
        **kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """The target's `generate`, in fewer forward passes.

        Args:
            inputs, generation_config, **kwargs: the arguments of transformers' `generate`. `assistant_model`, a model or a
                path, drafts in this call in place of the pair's draft, with `assistant_tokenizer` if it is not stored with it.
                It is prepared once and kept for further calls. `prompt_lookup_num_tokens`, `num_assistant_tokens` and
                `assistant_confidence_threshold` choose the nearest draft and draft length here, which a warning names once.
            draft_length: for this call, instead of the model's.
            assisted: False runs the target's own `generate`, without drafts; with `exact="bits"`, the same forward passes as
                with drafts.
            lossy_typical: when sampling, accept tokens that are typical of the target (Medusa's rule). Faster, and NOT exact:
                the text no longer follows the target's distribution.
            sessions: for this call, instead of the model's. `past_key_values` takes precedence over the model's.

        Returns the result of transformers' `generate`; counts and times are in `self.report`.

        Raises ValueError with the name of an argument that drafting does not support. Beam search and other modes that are
        neither sampling nor greedy run without drafts, with a warning. If the model's own `generation_config` chooses a
        drafting method of transformers (`prompt_lookup_num_tokens`), it is not used, and a warning is given once.
        """
        _require_known(kwargs, self.generate)
        kwargs = with_cache_renamed(kwargs)
        if inputs is not None and not isinstance(inputs, torch.Tensor):
            raise ValueError(
                f"inputs: a tensor of token ids is expected, got {type(inputs).__name__}; write "
                'model.generate(**tokenizer(text, return_tensors="pt"))'
            )
        require_tensors(self.target, kwargs)
        if assisted and (asked := asked_for(generation_config, self.generation_config, kwargs)) is not None:
            draft_length = self._length_for(asked, draft_length)
            generation_config, kwargs = without(asked, generation_config, kwargs)
            if (other := self._pair_for(asked, kwargs.get("tokenizer"))) is not self:
                further: dict[str, Any] = {
                    "draft_length": draft_length,
                    "lossy_typical": lossy_typical,
                    "sessions": sessions,
                }
                output: Any = other.generate(inputs, generation_config, **further, **kwargs)
                self.report, self.length = other.report, other.length
                return output
        require_numbers(generation_config, self.generation_config, kwargs)
        policy = self.draft_length if draft_length is None else lengths.resolve(draft_length)
        if assisted:
            require_own_drafting(generation_config, self.generation_config, kwargs)
        if lossy_typical is not None and not assisted:
            raise ValueError("lossy_typical: has no effect without drafts; leave it out, or pass assisted=True")
        pool = require_pool(self.sessions if sessions is None else sessions)
        if kwargs.get(CACHE) is not None:
            if sessions is not None:
                raise ValueError(f"sessions: {CACHE} holds what has been read; pass one of the two")
            pool = None
        recorder = Recorder(self.watch, started=now(), draft=self._drafts_with)
        mode, bits = require_mode(self.fast, self.exact), self.exact is not None
        if bits and lossy_typical is not None:
            raise ValueError("lossy_typical: is not possible with exact='bits'")
        settings = CallSettings(mode, bits, ranks=ranks_of(self.target, *self.drafter.modules))
        drafts = assisted
        assisted = assisted or bits  # without drafts, too, bits are those of the same forward passes
        if not assisted:
            recorder.ran("plain", "assisted=False")
        elif (reason := self._must_be_plain(settings, {"inputs": inputs, **kwargs})) is not None:
            recorder.ran("plain", reason)
            warn_plain(reason)
            assisted = False
        if isinstance(kwargs.get(CACHE), Session):
            if setting_of(kwargs, generation_config, None, "use_cache") is False:
                raise ValueError(
                    "use_cache: False leaves a session nothing to keep; leave out past_key_values or use_cache"
                )
            kwargs["use_cache"] = True  # without it, as in MPT's config, every forward pass would add the whole text
        if isinstance(kwargs.get(CACHE), Session) and Traits.of(self.target).cache_argument != CACHE:
            settings.note(
                "past_key_values: a session's text is read whole: states do not show how many tokens they have read"
            )
            del kwargs[CACHE]
        started: list[tuple[Any, lengths.Length]] = []  # by the kind of call, if it was assisted
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        others = Traits.of(self.target).reads and any(
            isinstance(value, torch.Tensor) for value in beside_text(kwargs).values()
        )
        others = others or any(kwargs.get(name) is not None for name in ("inputs_embeds", "position_ids"))
        of_tokens = None if others else prompt
        resumes = not isinstance(kwargs.get(CACHE), Session) or self._resumes(settings)
        mask = mask_of(of_tokens, kwargs, generation_config, self.generation_config)
        if not Traits.of(self.target).crosses and (padded := padding_at_end(mask)) is not None:
            if drafts:
                raise ValueError(f"{padded}, or pass assisted=False for what the target's own generate makes of it")
            settings.note(padded)
        target: Any = unwrapped(self.target)
        change = change_of(target) if isinstance(kwargs.get(CACHE), Session) else None
        with using(kwargs.get(CACHE), target, of_tokens, mask, resumes, change):
            if assisted:
                start_length = functools.partial(self._start_length, policy, started, settings.ranks)
                call = Generation(
                    self, start_length, self._warn_ignored, recorder, settings, lossy_typical, pool, drafts
                )
                self._running = recorder
                try:
                    output = call.run(inputs, generation_config, kwargs)
                finally:
                    self._running = None
                    settings.over = True
                    for _, length in started:
                        length.end()
            else:
                first = () if inputs is None else (inputs,)  # its name differs between models
                output = read_plainly(self.target, first, generation_config, kwargs)
                recorder.warnings = settings.warnings
        if not recorder.row_tokens:
            if Traits.of(self.target).crosses:  # what went into the encoder is not in the text
                prompt = kwargs.get("decoder_input_ids")
                prompt = torch.ones(1, 1) if prompt is None else prompt
            _count_plain(recorder, output, 0 if prompt is None else prompt.shape[1])
        recorder.stop()
        with _BOOKS:
            self._recorded.add(recorder)
            for kind, length in started:
                self._lengths = [*(entry for entry in self._lengths if entry[0] != kind), (kind, length)][-_KINDS:]
        for kind, length in started:
            if length.costs is not None and settings.ranks.is_first:
                remembered.remember(self._costs_key(kind, settings.ranks), length.costs)
        self.report = recorder.report()
        return output

    def generate_many(
        self,
        prompts: Iterable[Any],
        rows: int = 8,
        *,
        draft_length: int | str | lengths.DraftLength | None = None,
        **kwargs: Any,
    ) -> Iterator[Answer]:
        """Answers to any number of prompts, of which `rows` are decoded together, with drafts.

        Whenever a text ends, its answer is yielded and the next prompt takes its row. Each answer is that of `generate` for its
        prompt alone; when sampling, it has the same distribution.

        Args:
            prompts: token ids of each prompt: a list, a tensor [P] or [1, P], or what a tokenizer returns. Taken from the
                iterable one at a time, when there is room.
            rows: maximum number of texts at a time. Answers arrive in the order in which they end.
            draft_length: for this call, instead of the model's.
            **kwargs: of `generate`, for all prompts. `max_new_tokens` counts for each of them.

        The target's rows must not advance in lockstep, and drafts must come from text or from a draft model. Counts are in
        `report` when the iterator ends.

        Raises ValueError with the name of what this does not support.
        """
        _require_known(kwargs, self.generate_many)
        require_own_drafting(kwargs.get("generation_config"), self.generation_config, kwargs)
        require_numbers(kwargs.get("generation_config"), self.generation_config, kwargs)
        policy = self.draft_length if draft_length is None else lengths.resolve(draft_length)
        recorder = Recorder(self.watch, started=now())
        settings = CallSettings(require_mode(self.fast), ranks=ranks_of(self.target, *self.drafter.modules))
        if (reason := self._must_be_plain(settings, kwargs)) is not None:
            raise ValueError(f"target: {reason}; generate_many cannot run it, so call generate")
        if self.exact is not None:
            raise ValueError(f"exact: {self.exact!r} is not kept by generate_many; call generate, or set exact to None")
        started: list[tuple[Any, lengths.Length]] = []
        start_length = functools.partial(self._start_length, policy, started, settings.ranks)
        call = Preparation(self, start_length, self._warn_ignored, recorder, settings)
        answers = generate_many(call, prompts, rows, kwargs)
        return self._finishing(answers, recorder, settings, started)

    def _finishing(
        self, answers: Iterator[Answer], recorder: Recorder, settings: CallSettings, started: list[Any]
    ) -> Iterator[Answer]:
        """The same answers. At their end, or when nobody wants more, the call is counted."""
        try:
            yield from answers
        finally:
            settings.over = True
            recorder.stop()
            for _, length in started:
                length.end()
            with _BOOKS:
                self._recorded.add(recorder)
            self.report = recorder.report()

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The target's own `generate_batch`, which decodes many requests together, without drafts and with one warning."""
        self._warn_continuous()
        recorder = Recorder(started=now(), way="plain", because=_CONTINUOUS)
        results: dict[str, Any] = self.target.generate_batch(inputs, *args, **kwargs)
        recorder.row_tokens = [len(found.generated_tokens) for found in results.values()]
        recorder.target_passes = sum(max(0, tokens - 1) for tokens in recorder.row_tokens)
        recorder.stop()
        with _BOOKS:
            self._recorded.add(recorder)
        self.report = recorder.report()
        return results

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """The target's own manager of requests, which decodes without drafts and without a report, with one warning."""
        self._warn_continuous()
        return self.target.init_continuous_batching(*args, **kwargs)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """As `init_continuous_batching`, for a `with` block."""
        self._warn_continuous()
        return self.target.continuous_batching_context_manager(*args, **kwargs)

    def _warn_continuous(self) -> None:
        self.report = Report(way="plain", because=_CONTINUOUS)  # an earlier call's would be taken for this one's
        if "continuous batching" not in self._warned:
            self._warned.add("continuous batching")
            warn_plain(
                "continuous batching runs the target's own loop over all requests; `generate` with a batch drafts"
            )

    def session(self) -> Session:
        """Keys and values for a text that continues over several calls.

        Pass it as `past_key_values`, with the whole text so far as the prompt. The target and the drafter read each token only
        once.
        """
        if Traits.of(self.target).crosses:
            raise ValueError(
                "session: an encoder-decoder reads every input anew, so its texts do not go on; leave it out"
            )
        target = unwrapped(self.target)
        return Session(target.config.get_text_config(decoder=True), target)

    @property
    def running(self) -> Report | None:
        """Counts and times so far of the assisted `generate` that was started last and has not ended; None between calls."""
        recorders = (pair._running for pair in (self, *(other for _, other in self.other_pairs.values())))
        recorder = next((recorder for recorder in recorders if recorder is not None), None)
        return None if recorder is None else recorder.report()

    @property
    def totals(self) -> Report:
        """Counts over all calls since the last `reset_totals`."""
        with _BOOKS:
            return self._recorded.report()

    def reset_totals(self) -> None:
        """Reset `totals`."""
        self._recorded = Recorder()

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, push_to_hub: bool = False, custom_generate: bool = False, **kwargs: Any
    ) -> None:
        """Write one folder: `target/`, `draft/` (if the draft is a model), and a config.json for the pair.

        save_directory: the folder. custom_generate: also write `custom_generate/generate.py`, with which the target's own
        `generate(custom_generate=FOLDER_OR_ID, trust_remote_code=True)` drafts. kwargs: of the target's `save_pretrained`, or
        of `push_to_hub`.

        For a model with a PEFT adapter only the adapter is written, which names its base model. Raises ValueError if it could
        not be read back.
        """
        if custom_generate and push_to_hub:
            raise ValueError(
                "custom_generate: push_to_hub writes the folder again, without it; save the folder first, and upload it with "
                "`hf upload REPOSITORY FOLDER`"
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        hub = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private", "token") if name in kwargs}
        target = self.target
        if has_adapter(target):
            save_adapter(target, folder / "target", "target", **kwargs)
        else:
            target = unmarked(target)
            save_target(target, folder / "target", **kwargs)
        if kwargs.get("is_main_process") is False:
            return
        write_index(folder, "target")
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder / "target")
        if Traits.of(self.target).reads:
            copy_processor(self.target.name_or_path, folder, folder / "target")
        self.spec.save(self.drafter, folder / "draft", self.tokenizer)
        self.config.draft_length = lengths.to_dict(self.draft_length)
        config = copy.copy(self.config)
        if target is not self.target:
            config.target = target.config
        config.save_pretrained(folder)
        if custom_generate:
            config.save_entry(folder)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.name), **hub)

    def _apply(self, fn: Any, recurse: bool = True) -> AssistedModelForCausalLM:
        """Move or cast the draft together with the target."""
        super()._apply(fn, recurse)
        for module in self.drafter.modules:
            module._apply(fn, recurse)
        self.other_pairs = {}
        return self

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the target and the draft as they are stored; shared tensors count once.

        return_buffers: whether to count buffers, such as tables of positions.
        """
        return memory_bytes(self.target, *self.drafter.modules, buffers=return_buffers)

    def _length_for(self, asked: Asked, draft_length: Any) -> Any:
        """The draft length of a call. Warns once of settings that stand for another one. Raises ValueError for two."""
        if asked.length is None:
            return draft_length
        if draft_length is not None:
            raise ValueError(f"draft_length: {min(asked.settings)} sets it, too; pass one of the two")
        if str(asked) not in self._warned:
            self._warned.add(str(asked))
            warnings.warn(str(asked), stacklevel=4)  # the caller's line
        return asked.length

    def _pair_for(self, asked: Asked, tokenizer: PreTrainedTokenizerBase | None) -> AssistedModelForCausalLM:
        """The pair that runs a call: the target with the draft that was asked for, as this pair is set. Raises ValueError for
        drafts that do not fit."""
        draft, of_draft = asked.draft, asked.draft_tokenizer
        own: Any = getattr(self.drafter, "model", None)
        if draft is None or (draft is own and of_draft in (None, getattr(self.drafter, "tokenizer", None))):
            return self
        key = (draft if isinstance(draft, (str, Spec)) else id(draft), id(of_draft))
        if key not in self.other_pairs:
            try:
                other = self.from_models(
                    self.target, draft, tokenizer=self.tokenizer or tokenizer, draft_tokenizer=of_draft
                )
            except (ValueError, OSError) as error:
                raise (OSError if isinstance(error, OSError) else ValueError)(f"assistant_model: {error}") from error
            named = draft if isinstance(draft, str) else getattr(draft, "name_or_path", "") or type(draft).__name__
            other._drafts_with = repr(draft) if isinstance(draft, Spec) else named
            self.other_pairs = dict([*self.other_pairs.items(), (key, (asked, other))][-_OTHERS:])
        other = self.other_pairs[key][1]
        for name in ("fast", "exact", "sessions", "draft_length", "watch", "_warned", "_recorded"):
            setattr(other, name, getattr(self, name))
        return other

    def _must_be_plain(self, settings: CallSettings, kwargs: dict[str, Any]) -> str | None:
        """Why the target's own `generate` must run a call; None if drafts may be verified. kwargs: of the call."""
        if kwargs.get("adapter_names") is not None:
            return MIXED
        given = {type(value) for value in kwargs.values() if isinstance(value, torch.Tensor)}
        return outside_layers(self.target) or settings.trust_in(self.target).between or blamed(given)

    def _resumes(self, settings: CallSettings) -> bool:
        """Whether the target can read on after what a session holds; if not, the settings note it."""
        target: Any = unwrapped(self.target)
        reason = obstacle_to_reading_on(target, settings.trust_in(target))
        if reason is not None:
            settings.note(f"past_key_values: a session's text is read whole in every call: {reason}")
        return reason is None

    def _start_length(
        self,
        policy: lengths.DraftLength,
        started: list[tuple[Any, lengths.Length]],
        ranks: Ranks,
        rows: int,
        do_sample: bool,
    ) -> lengths.Length:
        """The policy's state for a call, added to `started` with the kind of the call: policy, rows, greedy or sampled, device.
        It may continue from the measurements of the last finished call of its kind."""
        kind = (policy, rows, do_sample, device_of(self.target))
        found = next((entry for entry in self._lengths if entry[0] == kind), None)
        if found is None and isinstance(policy, lengths.Adaptive):
            costs = remembered.recall(self._costs_key(kind, ranks)) if policy.costs is None else policy.costs
            share = self._share_of_weights() if policy.draft_cost is None else policy.draft_cost
            costs, share = ranks.first((costs, share))  # files and parts of the weights may differ between processes
            further = self._share_of_position(rows) if policy.position_cost is None else policy.position_cost
            policy = dataclasses.replace(policy, costs=costs, draft_cost=share, position_cost=further)
        length = self.drafter.start_length(policy, None if found is None else found[1])
        started.append((kind, length))
        self.length = length
        return length

    def _share_of_weights(self) -> float | None:
        """Bytes of the draft's own weights as a share of the target's; None for a draft that has none.

        Reading weights takes most of a forward pass, so this is a guess of a draft's cost before any is measured.
        """
        target = memory_bytes(self.target)
        own = memory_bytes(self.target, *self.drafter.modules) - target
        return own / target if own and target else None

    def _share_of_position(self, rows: int) -> float | None:
        """What one more position of each row should add to a forward pass, as a share of a forward pass over one position; None
        where it is `COLUMN`.

        On a CPU, each row adds a column to compute. Of a mixture of experts, more experts are read: the mean over the first
        few positions. Of an offloaded layer, accelerate fetches all of them in any case.
        """
        target: Any = unwrapped(self.target)
        each = lengths.COLUMN * (rows if device_of(target).type == "cpu" else 1)
        if Traits.of(target).experts is None or is_offloaded(target):
            return each if each > lengths.COLUMN else None
        return each + (growth(target, rows * (1 + _FEW), rows) - 1) / _FEW

    def _costs_key(self, kind: Any, ranks: Ranks) -> str:
        """Names everything that the costs of a kind of call depend on: the machine, the models and how they run."""
        ran = (kind, self.fast, torch.get_num_threads())
        if ran not in self._costs_keys:
            policy, rows, do_sample, device = kind
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()} {device.type}"
            models = [self.target, *self.drafter.modules]
            sizes = [(type(m).__name__, sum(p.numel() for p in m.parameters()), str(self.dtype)) for m in models]
            about = [name, *ran[1:], sizes, repr(self.config.draft), repr(policy), rows, do_sample]
            places = {str(place) for place in getattr(self.target, "hf_device_map", {}).values()}
            if len(places) > 1:
                about.append(sorted(places))
            if is_offloaded(self.target):
                about.append("offloaded")
            if ranks.several:
                about.append(f"{ranks.size} processes")
            self._costs_keys[ran] = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        return self._costs_keys[ran]

    def _warn_ignored(self, name: str, value: Any) -> None:
        """Warn once of a setting of the target's generation config that is not used here."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"generation_config.{name} = {value!r} is not used: it chooses a drafting method of transformers, and this "
                f"model drafts with {type(self.spec).__name__}. Instead: {OTHER_MODES[name]}, or set it to None.",
                stacklevel=7,  # the caller's line, above transformers' generate
            )


def _padding_side(target: Any) -> dict[str, str]:
    """How a target's tokenizer pads: a text goes on after its last token. An encoder's input does not go on."""
    return {} if Traits.of(target).crosses else {"padding_side": "left"}


def _require_known(kwargs: dict[str, Any], function: Callable[..., Any]) -> None:
    """Raise ValueError for what looks like a misspelled argument of `function`, and for `load_in_4bit=`."""
    own = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind == _KEYWORD]
    for name in kwargs:
        if name in ("load_in_4bit", "load_in_8bit"):
            raise ValueError(
                f"{name}: quantize when loading: quantization_config=BitsAndBytesConfig({name}=True) for the target, or "
                f'draft_quantization="{"nf4" if "4" in name else "int8"}" for the draft alone'
            )
        if (meant := closest(name, own, _ALIKE)) is not None:
            raise ValueError(f"{name}: there is no such argument; did you mean {meant}?")


def _one_of(name: str, value: Any, other: Any) -> Any:
    """An argument that transformers has another name for. Raises ValueError if both are given."""
    if value is not None and other is not None:
        theirs = name.replace("draft", "assistant") if "_" in name else "assistant_model"
        raise ValueError(f"{theirs}: this is another name of {name}, which is given, too; pass one of the two")
    return other if value is None else value


def _with_tokenizer(spec: Spec, tokenizer: Any, draft_tokenizer: Any) -> Spec:
    """A spec with the given tokenizer for its model. Raises ValueError for a tokenizer that would not be used."""
    for name, given in (("tokenizer", tokenizer), ("draft_tokenizer", draft_tokenizer)):
        if given is not None and not hasattr(given, "get_vocab"):
            raise ValueError(f"{name}: {given!r} is not a tokenizer; pass AutoTokenizer.from_pretrained(...)")
    if draft_tokenizer is None:
        return spec
    if not isinstance(spec, DraftModel):
        raise ValueError(
            f"draft_tokenizer: {type(spec).__name__} is not a single model with a tokenizer; leave it out, or, in a list, "
            "write DraftModel(PATH, tokenizer=...)"
        )
    return dataclasses.replace(spec, tokenizer=draft_tokenizer)


def _count_plain(recorder: Recorder, output: Any, prompt_length: int) -> None:
    """Counts of a run without drafts: one forward pass per token, where the first token comes from the pass over the prompt."""
    sequences = output if isinstance(output, torch.Tensor) else output["sequences"]
    rows, new = sequences.shape[0], sequences.shape[1] - prompt_length
    recorder.row_tokens = [new] * rows
    recorder.target_passes = rows * (new - 1)


def _with_dtype(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The default dtype is half precision on an accelerator, and the checkpoint's own on a CPU."""
    if kwargs.get("dtype") in DTYPES:
        return {**kwargs, "dtype": DTYPES[kwargs["dtype"]]}
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


# assisted/__init__.py may have added the names to transformers' tables already
AutoConfig.register("assisted", AssistedConfig, exist_ok=True)
AutoModelForCausalLM.register(AssistedConfig, AssistedModelForCausalLM, exist_ok=True)
