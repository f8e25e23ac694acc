"""From raw text to tokenised sequences on disk: read, template, pack, synthesize."""
