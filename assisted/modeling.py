"""AssistedModelForCausalLM: load a pair, generate with it, report, save. The main class of the package."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.random import fork_rng
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import logging

from . import lengths
from .calls.admission import going_on, require_tensors, warn_plain, why_outside_the_loop
from .calls.costs import CallLengths, Measured
from .calls.inputs import Setting, Settings
from .calls.words import (
    OTHER_MODES,
    Asked,
    asked_for,
    one_of,
    require_known,
    require_numbers,
    require_own_drafting,
    without,
)
from .configuration import AssistedConfig
from .core.drafts import Round
from .core.host import now
from .core.lossy import LossyTypical
from .core.report import Recorder, Report
from .engine.libraries import CACHE, compiled_part, with_cache_renamed
from .engine.parts import few_ids, uncompiled, unwrapped
from .engine.pool import SessionPool, require_pool
from .engine.prepared import CallSettings
from .engine.ranks import ranks_of
from .engine.session import Session
from .engine.traits import Traits
from .fast.graphs import Graphs, require_mode
from .forwarding import ForwardsToTarget
from .generation import Generation, read_plainly
from .loading.backends.quanto import copy_shells
from .loading.files import loading
from .loading.gguf import reading_once
from .loading.quantization import memory_bytes
from .loading.vocabulary import find_tokenizer
from .many import Answer, Preparation, generate_many
from .methods import Drafter, Spec
from .pairing import CARD_TAGS, draft_for, load, other_pair, padding_side, save

__all__ = ["AssistedModelForCausalLM"]

DraftLike: TypeAlias = str | Spec | torch.nn.Module | CandidateGenerator | Sequence[Any] | None
"""What `draft=` takes: a string, a spec, a causal LM, someone's drafter, or a list of these, which are combined."""

_BOOKS = threading.Lock()  # guards what calls in several threads write to a model
_WARM_UP = 16, 64  # tokens of the prompt of `warm_up`, and with its answer
_CONTINUOUS = "continuous batching runs the target's own loop over all requests"


class AssistedModelForCausalLM(ForwardsToTarget):
    """A causal LM or an encoder-decoder, with a draft: the target's own output, in fewer of its forward passes.

    In everything else it is the target: this object reads and changes the target's modules, weights, hooks and methods.

    Attributes:
        target: the target model, as it was given or loaded.
        drafter: the drafter.
        report: counts and times of the last `generate`, None before the first.
        totals: the same over all calls since `reset_totals`.
        length: the draft length of the last `generate`; `length.costs` are its measured costs.
        settings: how the pair decodes. Of these, the draft length, `fast` and `exact` (how forward passes run and how exactly)
            and `sessions` (what earlier calls have read) may be set at any time, see `from_pretrained`.
        measured: what calls have measured, for later ones.
        graphs: the captured forward passes of the target.
    """

    config_class = AssistedConfig
    spec, draft_length, fast, exact, sessions = Setting(), Setting(), Setting(), Setting(), Setting()

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
        self.settings = Settings(spec, draft_length)
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.report: Report | None = None
        self.length: lengths.Length | None = None
        self.measured = Measured()
        self._recorded = Recorder()
        self._running: Recorder | None = None
        self._warned: set[str] = set()  # what was warned of once
        self.other_pairs: dict[
            Any, tuple[Asked, AssistedModelForCausalLM]
        ] = {}  # with drafts of single calls, latest last
        self.watch: Callable[[Round], None] | None = None
        self.graphs = Graphs()
        self.made()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy: everything but the results of calls. A copy measures for itself."""
        fresh: dict[str, Any] = {
            "length": None,
            "measured": Measured(),
            "watch": None,
            "_running": None,
            "other_pairs": {},
            "settings": dataclasses.replace(self.settings, sessions=None),
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
        draft: DraftLike = None,
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
                of tokens and logits, and sampled text equals the text of the same seed without drafts. For models whose layers
                are fused, on CPUs and CUDA devices.
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
        require_known(kwargs, cls.from_pretrained)
        draft = one_of("draft", draft, kwargs.pop("assistant_model", None))
        draft_tokenizer = one_of("draft_tokenizer", draft_tokenizer, kwargs.pop("assistant_tokenizer", None))
        require_mode(fast, exact)
        require_pool(sessions)
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)) or not str(pretrained_model_name_or_path):
            raise ValueError(
                f"pretrained_model_name_or_path: {pretrained_model_name_or_path!r} is not a path; give a Hub id or a folder, "
                "or wrap a loaded model with from_models"
            )
        asked = functools.partial(
            Settings.parsed,
            draft_quantization=draft_quantization,
            draft_window=draft_window,
            tokenizers=(tokenizer, draft_tokenizer),
            fast=fast,
            exact=exact,
            sessions=sessions,
        )
        found = load(str(pretrained_model_name_or_path), draft, draft_length, asked, tokenizer, model_args, kwargs)
        with nullcontext() if found.folder is None else loading("draft", found.folder):
            return cls._assemble(found.target, found.settings, found.tokenizer, found.origin, found.for_draft)

    @classmethod
    def from_models(
        cls,
        target: PreTrainedModel,
        draft: DraftLike = None,
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
        if (part := compiled_part(target)) is not None:
            what = f"its part {part} was compiled" if part else "it was compiled in place (target.compile())"
            warnings.warn(
                f"target: {what}, so each number of drafted tokens compiles it again. Leave that out: "
                'fast="compile" compiles the forward passes that run here.',
                stacklevel=2,
            )
        tokenizers = tokenizer, draft_tokenizer
        ran = {"fast": fast, "exact": exact, "sessions": sessions}
        settings = Settings.parsed(draft, draft_length, draft_quantization, draft_window, tokenizers, **ran)
        folder = target.name_or_path if Path(target.name_or_path or "-").is_dir() else None
        return cls._assemble(target, settings, tokenizer or find_tokenizer(folder, **padding_side(target)), folder, {})

    @classmethod
    def _assemble(
        cls,
        target: PreTrainedModel,
        settings: Settings,
        tokenizer: PreTrainedTokenizerBase | None,
        path: str | None,
        hub: dict[str, Any],
    ) -> AssistedModelForCausalLM:
        spec, drafter = draft_for(target, settings.spec, tokenizer, path, hub)
        config = AssistedConfig(
            target=target.config,
            draft=spec.written("draft"),
            draft_length=lengths.to_dict(settings.draft_length),
            architectures=[AutoModelForCausalLM.__name__],  # transformers and its server look this name up
            dtype=target.dtype,
        )
        model = cls(config, target, spec, drafter, settings.draft_length, tokenizer)
        model.settings = dataclasses.replace(settings, spec=spec)
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
            draft_length, sessions: for this call, instead of the model's. `past_key_values` takes precedence over its sessions.
            assisted: False runs the target's own `generate`, without drafts; with `exact="bits"`, the same forward passes as
                with drafts.
            lossy_typical: when sampling, accept tokens that are typical of the target (Medusa's rule). Faster, and NOT exact:
                the text no longer follows the target's distribution.

        Returns the result of transformers' `generate`; counts and times are in `self.report`.

        Raises ValueError with the name of an argument that drafting does not support. Beam search and other modes that are
        neither sampling nor greedy run without drafts, with a warning. If the model's own `generation_config` chooses a
        drafting method of transformers (`prompt_lookup_num_tokens`), it is not used, and a warning is given once.
        """
        require_known(kwargs, self.generate)
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
            if (other := other_pair(self, asked, kwargs.get("tokenizer"))) is not self:
                further: dict[str, Any] = {"lossy_typical": lossy_typical, "sessions": sessions}
                output: Any = other.generate(inputs, generation_config, draft_length=draft_length, **further, **kwargs)
                self.report, self.length = other.report, other.length
                return output
        require_numbers(generation_config, self.generation_config, kwargs)
        if assisted:
            require_own_drafting(generation_config, self.generation_config, kwargs)
        asks = self.settings.of_call(draft_length, assisted, lossy_typical, sessions, kwargs.get(CACHE))
        recorder = Recorder(self.watch, started=now(), draft=asks.named)
        settings = CallSettings(asks.fast, asks.exact is not None, ranks=ranks_of(self.target, *self.drafter.modules))
        assisted = asks.verifies
        if not assisted:
            recorder.ran("plain", "assisted=False")
        elif (reason := why_outside_the_loop(self.target, {"inputs": inputs, **kwargs}, settings)) is not None:
            recorder.ran("plain", reason)
            warn_plain(reason)
            assisted = False
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        lengths_of_call = CallLengths(self, asks.draft_length, settings.ranks)
        turn = self.graphs.turn(asks.fast, self.device, recorder) if assisted and settings.fuses else nullcontext()
        own = self.generation_config
        with turn, going_on(self.target, prompt, generation_config, own, kwargs, settings, asks.drafts):
            if assisted:
                call = Generation(self, lengths_of_call.start, self._warn_ignored, recorder, settings, asks)
                self._running = recorder
                try:
                    output = call.run(inputs, generation_config, kwargs)
                finally:
                    self._running = None
                    settings.over = True
                    recorder.once_seconds = settings.spent_once
                    lengths_of_call.end()
            else:
                output = read_plainly(self.target, () if inputs is None else (inputs,), generation_config, kwargs)
                recorder.warnings = settings.warnings
        if not recorder.row_tokens:
            if Traits.of(self.target).crosses:  # what went into the encoder is not in the text
                prompt = kwargs.get("decoder_input_ids")
                prompt = torch.ones(1, 1) if prompt is None else prompt
            recorder.count_plain(output, 0 if prompt is None else prompt.shape[1])
        self._count(recorder, lengths_of_call)
        lengths_of_call.remember()
        return output

    def warm_up(self, max_length: int = 2048, rows: int = 1, **kwargs: Any) -> int:
        """Capture the forward passes that later calls replay on a GPU, so that these calls do not wait for it. On a CPU, only
        `fast="compile"` has something to prepare.

        A call writes some tokens after an arbitrary prompt, which count nowhere; then forward passes are captured for texts of
        up to `max_length` tokens: over one token, over 8 and over 16. Token trees are captured when they occur.

        Args:
            max_length: of later calls, prompt included. What more than 4096 tokens need is captured when it occurs.
            rows: of later calls.
            **kwargs: of `generate`, as later calls have them: `do_sample` and its settings.

        Returns how many functions of the target are captured.
        """
        device = self.target.device
        if Graphs.may_capture(self.fast, device):
            max_length = min(max_length, Traits.of(self.target).context)
            other, ids = copy.copy(self), few_ids(unwrapped(self.target), _WARM_UP[0]).repeat(rows, 1)
            other._recorded = Recorder()
            call = {"max_length": max_length, "max_new_tokens": None, "eos_token_id": None, **kwargs}
            with fork_rng([device] if device.type == "cuda" else []):
                other.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[_ends_early], **call)
            self.graphs.ahead(rows, max_length)
            self.drafter.capture_ahead(rows, max_length)
        return self.graphs.captured

    def _count(self, recorder: Recorder, of_call: CallLengths | None = None) -> None:
        """Count a call that has ended, and keep what it has measured."""
        recorder.stop()
        with _BOOKS:
            self._recorded.add(recorder)
            for kind, length in () if of_call is None else of_call.started:
                self.measured.keep(kind, length)
        self.report = recorder.report()

    def generate_many(
        self,
        prompts: Iterable[Any],
        rows: int = 8,
        *,
        draft_length: int | str | lengths.DraftLength | None = None,
        progress: bool = False,
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
            progress: show a bar with the number of answers, unless transformers' bars are disabled.
            **kwargs: of `generate`, for all prompts. `max_new_tokens` counts for each of them.

        The target's rows must not advance in lockstep, and drafts must be able to begin another text in one row. Counts are in
        `report` when the iterator ends.

        Raises ValueError with the name of what this does not support.
        """
        require_known(kwargs, self.generate_many)
        call = Preparation.of(self, draft_length, kwargs)
        total = len(prompts) if isinstance(prompts, Sized) else None
        return self._finishing(generate_many(call, prompts, rows, kwargs), call, total, progress)

    def _finishing(
        self, answers: Iterator[Answer], call: Preparation, total: int | None, progress: bool
    ) -> Iterator[Answer]:
        """The same answers. At their end, or when nobody wants more, the call is counted."""
        try:
            yield from logging.tqdm(answers, total=total, unit="text") if progress else answers
        finally:
            call.end()

    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The target's own `generate_batch`, which decodes many requests together, without drafts and with one warning."""
        self._warn_continuous()
        recorder = Recorder(started=now(), way="plain", because=_CONTINUOUS)
        results: dict[str, Any] = self.target.generate_batch(inputs, *args, **kwargs)
        recorder.row_tokens = [len(found.generated_tokens) for found in results.values()]
        recorder.target_passes = sum(max(0, tokens - 1) for tokens in recorder.row_tokens)
        self._count(recorder)
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
        """Write one folder: `target/`, `draft/` (if the draft is a model), a config.json for the pair, and a model card unless
        the folder has a README.md.

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
        hub = {name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private", "token") if name in kwargs}
        save(self, folder, custom_generate, kwargs)
        if push_to_hub and kwargs.get("is_main_process") is not False:
            self.push_to_hub(hub.pop("repo_id", folder.name), **hub)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As a model's own, with tags that say what the folder is. kwargs: its further arguments."""
        return super().push_to_hub(repo_id, **{**kwargs, "tags": [*CARD_TAGS, *(kwargs.get("tags") or [])]})

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

    def _warn_ignored(self, name: str, value: Any) -> None:
        """Warn once of a setting of the target's generation config that is not used here."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"generation_config.{name} = {value!r} is not used: it chooses a drafting method of transformers, and this "
                f"model drafts with {type(self.spec).__name__}. Instead: {OTHER_MODES[name]}, or set it to None.",
                stacklevel=7,  # the caller's line, above transformers' generate
            )


def _ends_early(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    """The stopping criterion of `warm_up`."""
    return torch.full((len(ids),), ids.shape[1] >= _WARM_UP[1], device=ids.device)


# assisted/__init__.py may have added the names to transformers' tables already
AutoModelForCausalLM.register(AssistedConfig, AssistedModelForCausalLM, exist_ok=True)
