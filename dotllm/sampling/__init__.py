"""From logits to a token: penalties, truncation, temperature, coupled noise."""
