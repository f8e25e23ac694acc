"""One slim Transformer for every supported family, and the way its weights get in."""
