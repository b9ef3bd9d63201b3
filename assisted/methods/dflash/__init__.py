"""Block drafters, DFlash and DSpark: several tokens in one forward pass of a small head."""
