"""Reading GGUF files: the parser, the tensor types and the model configuration."""
