"""Text in and out: tokenizer, streaming detokeniser, chat templates, reply parsers."""
