"""Retrieval-augmented generation: RaLMSpec and Speculative RAG."""
