"""The operations that models are made of: their names and meaning, their NumPy definition, tracing, backend choice."""
