"""Independent references: the model's own implementation in `transformers`, and libllama from the same source tree."""
