"""`longspec draft`: from a target to a measured draft, with one command."""
