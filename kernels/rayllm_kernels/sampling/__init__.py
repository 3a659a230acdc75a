"""Drawing tokens, truncation, penalties, log-probabilities, and the noise that draws use."""
