"""What is decided before anything starts: options, what config.json says of a model, and what both come to."""
