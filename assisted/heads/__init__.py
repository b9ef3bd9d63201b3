"""Trained heads that draft from the target's hidden states: their modules and the checkpoint formats they come in."""
