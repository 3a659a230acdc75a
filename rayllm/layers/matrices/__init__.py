"""The weights of linear layers and of experts, in the model's dtype or in fewer bits: reading them, and products."""
