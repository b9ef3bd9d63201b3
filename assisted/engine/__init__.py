"""How a forward pass of a model is run over slots of keys and values, or over states."""
