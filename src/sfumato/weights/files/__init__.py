"""Files of checkpoints: GGUF, safetensors and what lies beside them. Knows no tensor's meaning."""
