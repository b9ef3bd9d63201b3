"""Many prompts in few rows: when a row's text ends, the next prompt takes its place."""

from .rows import Answer, Preparation, generate_many

__all__ = ["Answer", "Preparation", "generate_many"]
