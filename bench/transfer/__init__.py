"""How fast a KV cache is handed over, and how much of that a prompt's first tokens have to wait for.

The cache goes from a prefill worker's process into an engine's pool here, through the code that a decode
worker runs: read, verified, written to blocks. Bulk: a worker of the simulated engine, which has computed its
prompt at once, so nothing but the transfer is timed; against a bare gRPC stream of as many bytes in messages
as large, which nobody looks at. Overlap: a worker of the real model, whose pages travel while it computes.
"""
