"""Trained heads that draft from the target's hidden states: modules and checkpoint formats."""
