"""Multi-token prediction: the layers that a target was trained with."""
