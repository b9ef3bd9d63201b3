"""`assisted doctor`: what to expect of a pair, and what holds it back."""
