"""Reinforcement learning of a small language model on rollouts of a mixed-precision sampler fleet."""
