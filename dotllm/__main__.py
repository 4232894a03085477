"""`python -m dotllm` is the `dotllm` command."""

from dotllm.cli.app import main

if __name__ == "__main__":
    main()
