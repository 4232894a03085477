"""The `dotllm` command."""
