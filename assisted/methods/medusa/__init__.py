"""Medusa: several small heads over the last hidden state."""
