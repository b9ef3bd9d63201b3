"""Loading and saving: files, quantization, adapters, vocabularies, GGUF."""
