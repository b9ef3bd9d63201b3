"""The target's first layers draft over the target's own keys and values."""
