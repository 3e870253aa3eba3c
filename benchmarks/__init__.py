"""Benchmark: microbenchmarks, `python -m offpolicy_corr.benchmarks.<name>`."""
