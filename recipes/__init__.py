"""How the drafts that come with the package were made. Not part of the wheel."""
