"""The Gradio page: its tabs, the backends of the modalities, and the queue of model runs."""
