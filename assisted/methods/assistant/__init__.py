"""Gemma 4's assistants: small decoders that read the target's keys and values."""
