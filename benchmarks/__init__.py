"""Microbenchmarks: `python -m offpolicy_corr.benchmarks.<name>`."""
