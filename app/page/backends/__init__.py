"""What the page asks of a modality: one backend each for text, image, speech and a vLLM server."""
