"""Suffix trees over what was written: text that repeats."""
