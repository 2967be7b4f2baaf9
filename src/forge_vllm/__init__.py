"""vLLM as the engine of generators: `generator.engine: vllm`."""
