"""What the fuzzer tries: a case is a pure function of a seed and a number.

A case holds numbers, strings and names only, so that it prints as Python that makes it again. What the names stand for is in
arguments.py, drafts.py and edits.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from architectures import ARCHITECTURES, RECURRENT, VOCABULARY, WINDOW, Architecture
from pairs import ENDS

from . import arguments, changes, drafts, edits, weights

__all__ = ["BY_NAME", "CHANGED", "CROWDS", "Call", "Case", "Crowd", "Edit", "Request", "draw", "traits"]

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + RECURRENT}
FUSED = ("llama", "mistral", "mistral-window", "qwen2", "qwen3")  # have layers of this package's own: more to get wrong
ROUTED = ("moe", "mixtral", "gpt_oss", "deepseek", "glm4_moe", "dbrx", "llama4", "minimax", "kimi")
ROTARY = (*FUSED, "phi3", "olmo2", "granite", "gemma", "stablelm", "starcoder2", "seed_oss", "ernie4_5", "arcee")
ALONE_UNLIKE = ("nemotron_h", "zamba2")  # read a token alone in another way than several, which rows refuse
HYBRIDS = ("qwen3_next", "qwen3_5", "lfm2", "jamba", "mamba2")
ROWS = (1, 2, 3, 5, 8, 12)  # more cost little, and compare more
KNOWN = 20  # tokens of the prompts that drafts know
CHANGED = 0.2  # of the cases put somebody's code in the target
CROWDS = 0.1  # of the cases have rows that come and go
OF_A_PROMPT = (  # which only rows with settings of their own take
    *("min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"),
    "exponential_decay_length_penalty",
)
WARPING = ("do_sample", "top_k", "top_p", "temperature", "min_p")
WARPED = ({"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.6, "top_k": 0}, {"min_p": 0.1, "temperature": 1.5})
ALONE = {  # arguments of `generate` that rows do not take
    *(
        "streamer",
        "num_return_sequences",
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "num_beams",
        "output_hidden_states",
        "embeds",
    ),
    "prefill_chunk_size",  # with which transformers reads some recurrent models wrongly, and a row does not
    *("criteria", "max_time", "huge", "use_cache", "cache_implementation", "config_object"),
    *("processors", "prefix_allowed", "watermarking", "guidance_scale", "negative", "encoder_repetition_penalty"),
}
PROCESSED = {  # arguments that make processors of a row's own
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "min_length", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "sequence_bias", "forced_eos_token_id", "forced_bos_token_id"),
    "exponential_decay_length_penalty",
}
HEAD = 8  # head_dim of the tiny models


@dataclass(frozen=True)
class Call:
    """One call of `generate`.

    Args:
        lengths: tokens of each row's prompt; of a call that continues, of what is appended to every row (the first counts).
        seed: of the prompt's tokens.
        continues: "" begins anew, "text" passes the text so far and no cache, "cache" the text and the returned cache, "edit"
            the text with a change somewhere, and the pair's session.
        pads: "left" or "right", where shorter rows are padded; "shown" leaves attention_mask out.
        prompt: "random", "repeats" a few tokens, "known": what the corpora and heads of drafts.py begin with, or "pads" alone.
        hides: the pads of rows that ended are hidden from the turns that follow.
        arguments: of `generate`; what `arguments.made` makes of them.
        narrow: the pair is given ids of 32 bits.
    """

    lengths: tuple[int, ...]
    seed: int = 0
    continues: str = ""
    pads: str = "left"
    prompt: str = "random"
    hides: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    narrow: bool = False


@dataclass(frozen=True)
class Edit:
    """A change of the target between calls: a name of `edits.NAMES` or `changes.NAMES`, and what it is drawn from."""

    name: str
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """A text of a crowd.

    Args:
        call: of one row, as it is alone.
        shares: how many tokens of its prompt are those that all such requests begin with. A known prompt is one of several.
        told: how many tokens the target alone has appended to the prompt, which a row may just have written.
        when: the round in which it comes. patience: after how many new tokens nobody waits for more.
        draws: the seed of its own numbers, which draw its tokens.
    """

    call: Call
    shares: int = 0
    told: int = 0
    when: int = 0
    patience: int = 999
    draws: int | None = None


@dataclass(frozen=True)
class Crowd:
    """Texts in rows that come and go.

    chunk: as for `Batch`; None for `generate_many`. pool: rows find what others have read.
    """

    requests: tuple[Request, ...]
    rows: int = 3
    chunk: int | None = None
    pool: bool = False


@dataclass(frozen=True)
class Case:
    """A pair, and what is done with it.

    Args:
        architecture: a name of tests/architectures.py. weights: the seed of its weights. config: overrides.
        attention: an attention implementation other than the architecture's own.
        draft: a name of `core.drafts.NAMES`. draft_length, fast: as for `from_models`.
        packed: narrow products are packed as wide ones are, which tiny models do not have.
        weights_as: a name of `weights.NAMES`, or "" for the weights as they are.
        bits: of an exact="bits" pair, which is compared with itself without drafts, to the bit.
        steps: calls, crowds and edits, in order.
    """

    architecture: str = "llama"
    weights: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    dtype: str = "float32"
    draft: str = "draft-model"
    draft_length: int | str = 4
    fast: str = "auto"
    packed: bool = False
    weights_as: str = ""
    bits: bool = False
    steps: tuple[Call | Crowd | Edit, ...] = ()


def draw(seed: int, number: int, changed: float = CHANGED, crowds: float = CROWDS) -> Case:
    """Case `number` of `seed`. So many cases in turn go over all architectures as there are, and then again.

    changed: the share of cases with somebody's code in the target. crowds: that of rows that come and go.
    """
    chance = random.Random(f"{seed}:{number}")
    names = list(BY_NAME)
    random.Random(f"{seed}:order:{number // (2 * len(names))}").shuffle(names)
    architecture = names[number // 2 % len(names)] if number % 2 else chance.choice((*FUSED, *names))
    about = BY_NAME[architecture]
    routed = any(name in architecture for name in ROUTED)  # rounding chooses other experts
    half = chance.random() < 0.06 and not routed
    kinds = {name: weight for name, weight in drafts.NAMES.items() if not (half and name.startswith("self:"))}
    if about in RECURRENT and chance.random() < 0.3:
        kinds = {name: kinds[name] for name in drafts.FROM_TEXT}
    steps = _steps(chance)
    changing = random.Random(f"{seed}:{number}:change")
    if changing.random() < changed:
        steps = _changed(changing, [name for name in changes.NAMES if name != "low_bits_in_place" or not routed])
    if architecture in ("falcon-alibi", "gpt_neo"):  # which transformers itself reads wrongly from a static cache
        steps = tuple(map(_but_static, steps))
    case = Case(
        architecture,
        chance.choice((0, 0, 1)),
        _config(chance, about),
        "eager" if about.attention == "sdpa" and chance.random() < 0.2 else None,
        "bfloat16" if half else "float32",
        chance.choices(list(kinds), list(kinds.values()))[0],
        chance.choice((1, 2, 3, 4, 4, 5, 6, 8, 12, "adaptive", "adaptive", "confidence")),
        chance.choices(("auto", "eager"), (5, 1))[0],
        chance.random() < 0.15,
        steps=steps,
    )
    case = _as_brought(random.Random(f"{seed}:{number}:brought"), case)
    crowding = random.Random(f"{seed}:{number}:crowd")
    return _crowded(crowding, case) if crowding.random() < crowds else case


def _crowded(chance: random.Random, case: Case) -> Case:
    """The case with rows that come and go in place of its calls."""
    if BY_NAME[case.architecture].masks == "2d":  # whose rows advance in lockstep
        case = replace(case, architecture=chance.choice(FUSED), config={})
    if case.architecture in ALONE_UNLIKE:
        case = replace(case, architecture=chance.choice(HYBRIDS), config={})
    config = dict(case.config)
    config.pop("max_position_embeddings", None)  # an index beyond them is the error of all rows
    if config.get("rope_parameters", {}).get("rope_type") in ("dynamic", "longrope"):
        del config["rope_parameters"]  # with one length for all rows
    case = replace(case, config=config)
    if chance.random() < 0.4 or case.draft in drafts.IN_LOCKSTEP:
        kinds = drafts.HEADS if chance.random() < 0.6 else drafts.NAMES
        kinds = {name: weight for name, weight in kinds.items() if name not in drafts.IN_LOCKSTEP}
        case = replace(case, draft=chance.choices(list(kinds), list(kinds.values()))[0])
    about = BY_NAME[case.architecture]
    if about in RECURRENT:  # rows run their states over columns, which `eager` does not
        kinds = drafts.FOR_STATES + (drafts.COPIES if about in drafts.APART else ())
        case = replace(case, fast="auto", draft=case.draft if case.draft in kinds else chance.choice(kinds))
    elif drafts.refuses(case.draft, about):
        case = replace(case, architecture=chance.choice(FUSED), config={})
    steps: list[Crowd | Edit] = list(_crowds(chance))
    if chance.random() < 0.4:
        steps += [Edit(chance.choice(edits.NAMES), chance.randrange(100)), *_crowds(chance)]
    routed = any(name in case.architecture for name in ROUTED)
    weights_as, dtype = "views" if chance.random() < 0.05 else "", "float32"
    if chance.random() < 0.15 and not (
        routed or case.draft.startswith("self:") or any(isinstance(s, Edit) for s in steps)
    ):
        weights_as = chance.choice((*weights.QUANTIZED, *(weights.PACKED if case.architecture in FUSED else ())))
    if weights_as in weights.PACKED or (chance.random() < 0.06 and not routed):
        dtype = "bfloat16"
    return replace(case, bits=False, dtype=dtype, weights_as=weights_as, steps=tuple(steps))


def _crowds(chance: random.Random) -> Iterator[Crowd]:
    """The same texts several times, each time in other rows and in another order: the target alone writes them once."""
    texts, many = _texts(chance), chance.random() < 0.4
    if many:  # all have the arguments of the first one
        given = {name: value for name, value in texts[0].call.arguments.items() if name not in (*WARPING, *OF_A_PROMPT)}
        texts = [replace(one, call=replace(one.call, arguments=given), draws=None) for one in texts]
    for _ in range(chance.choice((2, 3, 4))):
        requests = [
            replace(
                one,
                when=chance.choice((0, 0, chance.randint(1, 40))),
                patience=chance.choice((999, 999, 999, 999, chance.randint(0, 12))),
            )
            for one in chance.sample(texts, len(texts))
        ]
        chunk = None if many and chance.random() < 0.7 else chance.choice((1, 4, 7, 7, 20, 256))
        rows = chance.choice((1, 2, 3, 4, 6, 8))
        yield Crowd(tuple(requests), rows, chunk, chunk is not None and chance.random() < 0.6)


def _texts(chance: random.Random) -> list[Request]:
    found = []
    for _ in range(chance.choice((2, 5, 8, 12, 12))):
        call = _call(chance, 1, False)
        given = {name: value for name, value in call.arguments.items() if name not in ALONE} | _of_row(chance)
        given["max_new_tokens"] = 1 if chance.random() < 0.05 else chance.choice((7, 30, 50, 60))
        if "do_sample" not in given and chance.random() < 0.25:
            given |= {"do_sample": True, **chance.choice(WARPED)}
        prompt = "pads" if chance.random() < 0.04 else call.prompt
        found.append(
            Request(
                replace(call, pads="left", prompt=prompt, arguments=given),
                0 if prompt in ("known", "pads") else chance.choice((0, 0, 3, 11, 40)),
                chance.choice((0, 0, 0, chance.randint(1, 30))),
                draws=chance.randrange(100) if given.get("do_sample") else None,
            )
        )
    return found


def _of_row(chance: random.Random) -> dict[str, Any]:
    """What a server's requests have more often than other calls."""
    found: dict[str, Any] = {"grammar": chance.randrange(99)} if chance.random() < 0.12 else {}
    return found | ({"stop_strings": arguments.STOPS} if chance.random() < 0.06 else {})


def traits(case: Case, crowd: Crowd, request: Request) -> list[str]:
    """What a text of a crowd tries."""
    call = request.call
    given, length = call.arguments, (KNOWN if call.prompt == "known" else call.lengths[0]) + request.told
    of_draft = next((kind for kind, names in drafts.KINDS.items() if case.draft in names), "other drafts")
    found = {
        of_draft: True,
        "recurrent or hybrid target": BY_NAME[case.architecture] in RECURRENT,
        "routed experts": any(name in case.architecture for name in ROUTED),
        "quantized target": case.weights_as not in ("", "views"),
        "bfloat16": case.dtype == "bfloat16",
        "edited between crowds": any(isinstance(step, Edit) for step in case.steps),
        "generate_many": crowd.chunk is None,
        "prompt read in parts": crowd.chunk is not None and length > crowd.chunk,
        "pool": crowd.pool,
        "shared beginning": bool(request.shares) or call.prompt == "known",
        "goes on after an answer": request.told > 0,
        "grammar": "grammar" in given,
        "stop strings": "stop_strings" in given,
        "drawn, with a seed": request.draws is not None,
        "processors": bool(given.keys() & PROCESSED),
        "limit of 1": given.get("max_new_tokens") == 1,
        "prompt of 1 or 2 tokens": length <= 2,
        "prompt of pads": call.prompt == "pads",
        "comes later": request.when > 0,
        "leaves early": request.patience < 999,
        "one row": crowd.rows == 1,
    }
    return [name for name, holds in found.items() if holds]


def _as_brought(chance: random.Random, case: Case) -> Case:
    """The case with what people bring: ids of 32 bits, odd vocabularies, other weights, texts that are edited, exact bits."""
    steps = [replace(step, narrow=chance.random() < 0.2) if isinstance(step, Call) else step for step in case.steps]
    changed = any(isinstance(step, Edit) for step in steps)
    if not changed and chance.random() < 0.5:  # after a change of the model, a session is as stale as any cache
        steps = [_edited(chance, step) for step in steps if isinstance(step, Call)]
    case = replace(case, steps=tuple(steps))
    if case.architecture in FUSED and chance.random() < 0.2:
        case = replace(case, config={**case.config, "vocab_size": VOCABULARY + chance.choice((1, 5, 31))})
    if changed or case.draft.startswith("self:"):
        return case
    names = weights.NAMES if case.architecture in FUSED else weights.NAMES[:4]
    if not any(name in case.architecture for name in ROUTED) and chance.random() < 0.2:
        case = replace(case, weights_as=chance.choice(names))
    if case.architecture in FUSED and chance.random() < 0.3 and case.weights_as in ("", "views", *weights.PACKED):
        dtype = "bfloat16" if case.weights_as in weights.PACKED else chance.choice(("bfloat16", "float32"))
        case = replace(case, bits=True, dtype=dtype, fast="auto", attention=None)
    return case


def _edited(chance: random.Random, call: Call) -> Call:
    """With a session, whose text is edited before the turns that follow."""
    continues = "edit" if call.continues and chance.random() < 0.7 else call.continues
    return replace(call, continues=continues, seed=call.seed | 1)  # odd: `running` gives the pair a session


def _but_static(step: Call | Edit) -> Call | Edit:
    if not isinstance(step, Call):
        return step
    return replace(step, arguments={name: value for name, value in step.arguments.items() if value != "static"})


def _config(chance: random.Random, about: Architecture) -> dict[str, Any]:
    """Overrides, none most of the time: a model is built for each."""
    config: dict[str, Any] = {}
    name = about.name
    if name in ROTARY and chance.random() < 0.35:
        config["rope_parameters"] = _rope(chance, longrope=name in (*FUSED, "phi3"))
        if name == "phi3" and config["rope_parameters"]["rope_type"] not in ("default", "longrope"):
            del config["rope_parameters"]
        elif config["rope_parameters"]["rope_type"] == "dynamic" and name == "stablelm":
            del config["rope_parameters"]  # two numbers of a head are turned, by which the rule divides by zero
        elif config["rope_parameters"]["rope_type"] == "longrope" and name == "phi3":
            config["original_max_position_embeddings"] = config["rope_parameters"]["original_max_position_embeddings"]
    if name in FUSED and chance.random() < 0.15:
        config["tie_word_embeddings"] = chance.random() < 0.5
    if name in FUSED and chance.random() < 0.1:
        config["num_key_value_heads"] = chance.choice((1, 4))
    if name.endswith("-window") and name != "qwen2-window" and chance.random() < 0.3:
        config["sliding_window"] = chance.choice((3, WINDOW, 20))
    if name in ("llama", "gpt2", "opt") and chance.random() < 0.08:
        config["max_position_embeddings"] = 64
    return config


def _rope(chance: random.Random, longrope: bool) -> dict[str, Any]:
    kind = chance.choice(("default", "linear", "dynamic", "yarn", "llama3", *(("longrope",) if longrope else ())))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    original = chance.choice((16, 32, 48, 64))
    if kind != "default":
        rope["factor"] = chance.choice((2.0, 4.0))
    if kind in ("yarn", "llama3", "longrope", "dynamic"):
        rope["original_max_position_embeddings"] = original
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * (HEAD // 2), "long_factor": [4.0] * (HEAD // 2)}
    return rope


def _steps(chance: random.Random) -> tuple[Call | Edit, ...]:
    """One to four calls, with edits between them in a third of the cases."""
    edited = chance.random() < 0.35
    found: list[Call | Edit] = []
    rows = chance.choice(ROWS)
    for number in range(chance.choice((1, 2, 2, 3)) + edited):
        if number and edited and chance.random() < 0.8:
            found.append(Edit(chance.choice(edits.NAMES), chance.randrange(100)))
        goes_on = number > 0 and chance.random() < 0.6
        if not goes_on:
            rows = chance.choice(ROWS)
        found.append(_call(chance, rows, goes_on))
    return tuple(found)


def _changed(chance: random.Random, names: Sequence[str]) -> tuple[Call | Edit, ...]:
    """A call before, during and after a change; some go on in between."""
    name, rows = chance.choice(names), chance.choice(ROWS[:4])
    call = _call(chance, rows, False)
    more = changes.ARGUMENTS.get(name, lambda chance: {})(chance)
    own = {"use_cache": True, "pad_token_id": 0, "eos_token_id": None} if more else call.arguments
    call = replace(call, arguments=own | {"max_new_tokens": chance.choice((12, 30, 50))})
    during = replace(call, arguments=call.arguments | more)
    found: list[Call | Edit] = [Edit(changes.PREPARED[name], chance.randrange(100))] if name in changes.PREPARED else []
    found += [call, Edit(name, chance.randrange(100)), during]
    if not more and chance.random() < 0.4:
        found.append(replace(_call(chance, rows, True), arguments=during.arguments))
    return (*found, Edit("undo"), call)


def _call(chance: random.Random, rows: int, goes_on: bool) -> Call:
    prompt = chance.choices(("random", "repeats", "known"), (3, 2, 3))[0]
    if goes_on:
        lengths: tuple[int, ...] = (chance.choice((0, 1, 1, 3, 6)),)
    else:
        longest = KNOWN if prompt == "known" else chance.choice((1, 2, 5, 12, 12, 20, 40, 60))
        same = prompt == "known" or chance.random() < 0.4
        lengths = (longest, *(longest if same else chance.randint(1, longest) for _ in range(rows - 1)))
    ends = chance.choices((None, 2, ENDS, [5, 40]), (4, 3, 2, 1))[0]
    call: dict[str, Any] = {
        "use_cache": True,
        "max_new_tokens": chance.choice((1, 2, 7, 20, 30, 40, 50, 60)),
        "eos_token_id": ends if ends is None or isinstance(ends, int) else list(ends),
        "pad_token_id": chance.choices((0, 3), (9, 1))[0],
    }
    for _ in range(chance.choices((0, 1, 2, 3), (4, 3, 2, 1))[0]):
        call |= arguments.drawn(chance, rows, VOCABULARY)
    return Call(
        lengths,
        chance.randrange(1000),
        ("cache" if chance.random() < 0.6 else "text") if goes_on else "",
        chance.choices(("left", "right", "shown"), (30, 1, 3))[0],
        prompt,
        chance.random() < 0.5,
        call,
    )
