"""The training engine on ranks: PyTorch's FSDP2, tensor parallel with DTensor, and replicas, of transformers models."""
