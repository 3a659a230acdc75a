"""One module a family of models, the loader of weights, and the registry that maps architectures to classes."""
