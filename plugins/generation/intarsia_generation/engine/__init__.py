"""The embedded generator: paged caches, continuous batching, prefix cache, weights that change while requests run.

In the order in which a request passes: `generator` (asyncio in front, a thread behind), `scheduler` and `blocks` (who computes what, and where it is kept), `context` (the
model's side of the caches), `chosen` (from hidden states to tokens), `engine` (one step of all of it). Importing this package imports no torch.
"""
