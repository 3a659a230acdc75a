"""RMSNorm, the gated activation, and what lies between the qkv projection and attention: rotary positions."""
