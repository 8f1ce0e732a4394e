"""Mixtures of experts: routers, balance, dispatchers' contract, experts over grouped products.

Importing this package imports no torch. Files in the order in which tokens pass: router, balance, dispatch, experts, block; `operators` holds what kernels may replace.
"""
