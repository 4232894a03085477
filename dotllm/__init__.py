"""dotllm: a GGUF LLM inference engine in pure Python."""

__version__ = "0.1.0"

__all__ = ["__version__"]
