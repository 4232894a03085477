"""The bundled story model: corpus, tokenizer, PyTorch model, training and export. See tools/train_demo.py."""
