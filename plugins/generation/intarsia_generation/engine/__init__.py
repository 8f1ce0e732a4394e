"""The embedded generator: paged caches, continuous batching, prefix cache, weights that change while requests run.

In the order in which a request passes: `generator` (asyncio in front, a thread behind), `scheduler` and `blocks` (who computes what, and where it is kept), `context` (the
model's side of the caches), `static` (steps in fixed shapes, which CUDA graphs hold), `runner` (the model with them), `chosen` (from hidden states to tokens), `engine` (one step of all of it). A generator of several processes has besides `tensor` (a
rank's part of the model), `ranks` (the first rank tells the others) and `follower` (what these do). Importing this package imports no torch.
"""
