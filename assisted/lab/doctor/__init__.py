"""`assisted doctor`: the expected speedup of a pair, and what limits it."""
