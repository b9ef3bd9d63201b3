"""How models come in and go out: files, quantization, adapters, vocabularies, GGUF."""
