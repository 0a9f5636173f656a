"""Files of strangers that run code: chat templates and tokenizers, handled in a child process with bounds."""
