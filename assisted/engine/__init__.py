"""Running forward passes of a model over slots of keys and values, or over recurrent states."""
