"""The command line: flags to one library call each. Nothing heavy is imported before it is needed."""
