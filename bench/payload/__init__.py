"""What a payload narrower than the cache does to replies: the same ones, from a cache that went through it.

A prompt's cache is computed by the engine, taken through a payload format and given back to it, as a decode
worker would be given it. The engine is then led along the reply that it gives without a handover, and its
logits at each position are compared with those of that reply.
"""
