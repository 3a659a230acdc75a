"""The layers of models. Each is made with a `BuildContext`, which knows the rank, the mode and the weights."""
