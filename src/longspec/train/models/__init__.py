"""The published import paths of the models that are trained."""
