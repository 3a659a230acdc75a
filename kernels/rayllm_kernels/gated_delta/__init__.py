"""Layers with a recurrent state: the gated delta rule, and the convolution before and the norm behind it."""
