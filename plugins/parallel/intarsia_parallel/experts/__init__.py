"""Expert parallelism: the role `expert`, and dispatchers that bring tokens to other ranks' experts.

The contract of dispatchers is `intarsia_models_common.moe.dispatch`; `crossing` moves rows while other work runs, `alltoall` and `fixed` are the dispatchers, `role` puts one into a model.
"""
