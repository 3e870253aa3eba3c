"""Adapters for trainers (Miles, verl, OpenRLHF) and record readers for samplers (SGLang, vLLM)."""
