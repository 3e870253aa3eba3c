"""Row passes: Triton kernels and their launches, reached through `offpolicy_corr.backend` only."""
