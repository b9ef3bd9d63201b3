"""EAGLE-1, 2 and 3 and P-EAGLE: a head that reads the target's hidden states."""
