"""A differential fuzzer: the same `generate` calls on a target alone and on a pair, in rows too, and model edits between.

`python -m tests.fuzz --help` says how to run it.
"""
