"""Drafts of a model with another tokenizer, translated."""
