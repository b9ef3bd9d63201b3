"""Grammars: logits processors that forbid tokens by what a row has written so far, with masks for every node of a draft."""

from .matcher import Matcher
from .processor import GrammarProcessor, PrefixProcessor
from .schemas import check_schema

__all__ = ["GrammarProcessor", "Matcher", "PrefixProcessor", "check_schema"]
