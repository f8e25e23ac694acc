"""The decoding methods: ways to propose a tree. Verifying, accepting and committing is the loop's."""
