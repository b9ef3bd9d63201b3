"""A small causal language model drafts, in chains or trees, or several tokens in one forward pass (PARD)."""
