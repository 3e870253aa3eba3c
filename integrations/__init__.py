"""Reader: answers of SGLang and vLLM as records (`sglang`, `vllm`); and the adapter for the trainer Miles (`miles`)."""
