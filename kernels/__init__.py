"""Triton kernels and their autograd wrappers; reached through `offpolicy_corr.backend` only."""
