"""Many sequences, one loop: everything that decodes runs on it."""
