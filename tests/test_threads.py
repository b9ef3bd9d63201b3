"""Several threads on one pair: every text is plain `generate`'s, whatever drafts, and one thread's failure is its own."""

import gc
import sys
import threading

import pytest
import torch
from architectures import build, half_right, random_ids
from covering import first_of_kinds, in_turns, only
from methods import METHODS, Method
from pairs import BY_NAME, CALL, no_fallback, said_by, tokenizer
from transformers import StoppingCriteria, TextIteratorStreamer

from assisted import AssistedModelForCausalLM, Combined, Suffix
from assisted.core.drafts import DraftingStopped
from assisted.engine.cache import SlotCache
from assisted.lengths import rates
from assisted.methods.early_exit.draft import ExitChoice
from assisted.methods.layer_skip import SkipSearch

THREADS = 4
TURNS = 2
OTHERS = [
    Method("combined", lambda target: Combined(["suffix", half_right(target)])),
    Method("suffix that remembers", lambda target: Suffix(remember=True)),
]
SOME = [method for method in METHODS if method.name in ("draft-model", "early-exit", "suffix", "medusa")]


@pytest.fixture(autouse=True)
def _often():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work, count=THREADS):
    """What `work` returns, or raises, for each of several numbers, in as many threads that start together."""
    found = [None] * count
    together = threading.Barrier(count)

    def run(number):
        together.wait()
        try:
            found[number] = work(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def check(target, model, draft_length=None):
    """Every thread writes what plain `generate` writes, calls of one row and of two, and nobody fell back."""
    prompts = [random_ids(target, 1 + number % 2, 9 + number, seed=number) for number in range(THREADS)]
    plain = [said_by(target, ids, attention_mask=torch.ones_like(ids), **CALL).tolist() for ids in prompts]
    model.reset_totals()

    def work(number):
        ids = prompts[number]
        call = CALL | {"attention_mask": torch.ones_like(ids), "draft_length": draft_length}
        return [model.generate(ids, **call).tolist() for _ in range(TURNS)]

    with no_fallback(DraftingStopped):
        found = in_threads(work)
    for one in found:
        if isinstance(one, BaseException):
            raise one  # with its own traceback
    assert found == [[text] * TURNS for text in plain]
    written = sum(len(text) * (len(text[0]) - ids.shape[1]) for ids, text in zip(prompts, plain, strict=True))
    assert model.totals.new_tokens == TURNS * written


@pytest.mark.parametrize(
    ("method", "length"), only(in_turns(METHODS + OTHERS, [None, 3]), first_of_kinds(METHODS + OTHERS))
)
def test_every_draft_in_four_threads(method, length):
    target = build(BY_NAME["llama"])
    check(target, AssistedModelForCausalLM.from_models(target, method.draft(target)), length)


@pytest.mark.quant
@pytest.mark.parametrize("draft", ["self:int8", "self:nf4"])
def test_quantized_drafts_in_four_threads(draft):
    from assisted import zoo

    model = AssistedModelForCausalLM.from_pretrained(zoo.folder("draft"), draft=draft, dtype=torch.float32)
    check(model.target, model)


def test_another_tokenizer_in_four_threads():
    target = build(BY_NAME["llama"])
    size = target.config.vocab_size
    other = tokenizer(size, first='"')
    model = AssistedModelForCausalLM.from_models(
        target, half_right(target), 3, tokenizer=tokenizer(size), draft_tokenizer=other
    )
    check(target, model)


def test_streamers_in_threads():
    target = build(BY_NAME["llama"])
    own = tokenizer(target.config.vocab_size)
    model = AssistedModelForCausalLM.from_models(target, half_right(target), tokenizer=own)
    prompts = [random_ids(target, 1, 9, seed=number) for number in range(THREADS)]
    plain = [target.generate(ids, **CALL)[0, 9:] for ids in prompts]

    def work(number):
        streamer = TextIteratorStreamer(own, skip_prompt=True, timeout=60)
        writer = threading.Thread(target=model.generate, args=(prompts[number],), kwargs=CALL | {"streamer": streamer})
        writer.start()
        text = "".join(streamer)
        writer.join()
        return text

    assert in_threads(work) == [own.decode(ids) for ids in plain]


class Stopped(BaseException):
    """As KeyboardInterrupt, no Exception."""


class Stops:
    """A streamer that ends its call."""

    def __init__(self):
        self.left = 5

    def put(self, value):
        self.left -= 1
        if self.left == 0:
            raise Stopped

    def end(self):
        pass


class Fails(StoppingCriteria):
    """A criterion that fails in the answer."""

    def __call__(self, input_ids, scores, **kwargs):
        raise KeyError


@pytest.mark.parametrize("method", SOME, ids=lambda m: m.name)
def test_a_thread_that_is_stopped_stops_alone(method):
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, method.draft(target))
    prompts = [random_ids(target, 1, 9, seed=number) for number in range(THREADS)]
    plain = [target.generate(ids, **CALL).tolist() for ids in prompts]

    def work(number):
        for _ in range(TURNS):
            text = model.generate(prompts[number], streamer=Stops() if number == 0 else None, **CALL).tolist()
        return text

    found = in_threads(work)
    assert isinstance(found[0], Stopped) and found[1:] == plain[1:]
    assert model.generate(prompts[0], **CALL).tolist() == plain[0]


def test_drafts_lengths_and_failures_of_each_thread_are_its_own():
    """Pairs of one target, one of which is interrupted, while a call of another has a wrong argument and one fails later."""
    target, drafts = build(BY_NAME["llama"]), {method.name: method.draft for method in SOME}
    models = [AssistedModelForCausalLM.from_models(target, draft(target)) for draft in drafts.values()]
    prompts = [random_ids(target, 1, 5 + 9 * number, seed=number) for number in range(THREADS)]
    plain = [said_by(target, ids, **CALL | {"max_new_tokens": 12 + 9 * at}).tolist() for at, ids in enumerate(prompts)]
    failures = {
        0: ({"streamer": Stops}, Stopped),
        1: ({"max_new_tokens": lambda: -3}, ValueError),
        2: ({"stopping_criteria": lambda: [Fails()]}, KeyError),
    }

    def work(number):
        texts, call = [], CALL | {"max_new_tokens": 12 + 9 * number, "draft_length": (None, 3)[number % 2]}
        for _ in range(TURNS):
            wrong, kind = failures.get(number, ({}, ()))
            if wrong:
                with pytest.raises(kind):
                    models[number].generate(prompts[number], **call | {name: make() for name, make in wrong.items()})
            texts.append(models[number].generate(prompts[number], **call).tolist())
            texts.append(models[3].generate(prompts[number], **call).tolist())
        return texts

    assert in_threads(work) == [[text] * (2 * TURNS) for text in plain]


def test_what_is_learned_may_be_read_meanwhile():
    """Figures that the calls of one pair share."""
    choice, known = ExitChoice(8), rates.Rates()
    search = SkipSearch([0.1] * 3, 0.4, [0, 1, 2], 1)

    def work(number):
        for _ in range(300):
            choice.learn_cost(1 + number, 0.3)
            choice.cost(3)
            known.learn([((0.5, 0.2), 0, (True, False))])
            known.at([0.5, 0.1])
            search.candidate()

    assert in_threads(work) == [None] * THREADS


def slots() -> int:
    """How many objects that hold keys and values are alive."""
    gc.collect()
    return sum(issubclass(type(one), SlotCache) for one in gc.get_objects())


def test_calls_leave_their_slots_to_nobody():
    """What a call measured is kept for later ones; what it held is not."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, Combined(["suffix", half_right(target)]))
    before = slots()
    model.generate(random_ids(target, 1, 9), **CALL)
    assert model.report.drafted > 0 and len(model.length.members) == 2
    assert slots() <= before
