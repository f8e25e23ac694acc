"""Training drafts."""
