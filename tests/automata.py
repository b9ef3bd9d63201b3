"""Grammars that need no library: automata over tokens."""

import random

import torch
from architectures import VOCABULARY
from pairs import ENDS

from assisted.grammars import GrammarProcessor, Matcher

__all__ = ["END", "Automaton", "Brackets", "Fragile", "any_grammar", "brackets"]

END = 2


class Automaton(Matcher):
    """edges: of each state, the next state by token; the end token has none, and ends the text."""

    def __init__(self, edges, end=END, packed=False, size=VOCABULARY):
        self.edges, self.end, self.packed, self.size = edges, end, packed, size
        self.states = [0]

    @property
    def ended(self):
        return self.states[-1] is None

    def allowed(self, size):
        mask = torch.zeros(min(size, self.size), dtype=torch.bool)
        mask[list(self.edges[next(state for state in reversed(self.states) if state is not None)])] = True
        if not self.packed:
            return mask
        padded = torch.nn.functional.pad(mask, (0, -len(mask) % 32)).view(-1, 32).long()
        words = (padded << torch.arange(32)).sum(1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def advance(self, token):
        assert not self.ended
        if token not in self.edges[self.states[-1]]:
            return False
        self.states.append(self.edges[self.states[-1]][token])
        return True

    def rollback(self, count):
        assert 0 < count < len(self.states)
        del self.states[len(self.states) - count :]


class Brackets(Automaton):
    """Tokens of ten kinds, where those of two are an opening and a closing bracket, at most four deep."""

    def __init__(self, **kwargs):
        edges = {}
        for depth in range(5):
            edges[depth] = {token: depth for token in range(10, VOCABULARY) if token % 10 > 2}
            edges[depth] |= {token: depth + 1 for token in range(10, VOCABULARY, 10) if depth < 4}
            edges[depth] |= {token: depth - 1 for token in range(11, VOCABULARY, 10) if depth}
            edges[depth] |= {token: None for token in ENDS if not depth}
        super().__init__(edges, **kwargs)


class Fragile(Brackets):
    """Fails after drafted tokens. Without drafts, it goes on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.settled = 1

    def settle(self):
        self.settled = len(self.states)

    def allowed(self, size):
        if len(self.states) > self.settled:
            raise RuntimeError("no such state")
        return super().allowed(size)


def brackets(**kwargs):
    return GrammarProcessor(lambda: Brackets(**kwargs))


def any_grammar(seed):
    """A grammar of six states. Some allow a single token, and some the end."""
    chance, edges = random.Random(seed), {}
    for state in range(6):
        tokens = chance.sample(range(5, VOCABULARY), chance.choice((1, 3, 30, 60)))
        edges[state] = {token: chance.randrange(6) for token in tokens}
        edges[state] |= {token: None for token in ENDS if chance.random() < 0.2}
    return GrammarProcessor(lambda: Automaton(edges, packed=bool(seed % 2)))
