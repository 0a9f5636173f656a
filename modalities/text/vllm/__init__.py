"""vLLM as an engine: export of our drafters, its server and its client."""
