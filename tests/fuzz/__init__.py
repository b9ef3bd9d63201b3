"""A differential fuzzer: the same `generate` calls on a target alone and on a pair, and edits of the model between them.

`python -m tests.fuzz --help` says how to run it.
"""
