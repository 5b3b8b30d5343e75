"""Text models: a tokenizer, a logits and a decoder stage that one engine runs."""
