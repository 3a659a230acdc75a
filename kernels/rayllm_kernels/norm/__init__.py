"""RMSNorm, the gated activation, rotary positions, and what lies between the qkv projection and attention."""
