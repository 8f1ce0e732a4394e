"""Context parallelism: a row's tokens are shared out over the ranks of `cp`, and mixers see the whole row all the same.

    cut.py                which tokens of a row each rank holds, and the cutting of batches
    plan.py               who sees whose keys, in whole numbers
    block.py              attention of some queries over some keys, with its log-sum-exp
    transfer.py           parts of the sequence from rank to rank
    rows.py               documents and positions of the whole rows
    ring.py gather.py ulysses.py      softmax attention, three ways
    latent.py recurrent.py            compressed latents; recurrences with a state
    choose.py             the cost rule of `auto`, and which cut a model takes
    parallel_context.py   the SequenceContext made of all that

Public: `cut.SequenceCut`, `choose.cut_for`, `parallel_context.build`.
"""
