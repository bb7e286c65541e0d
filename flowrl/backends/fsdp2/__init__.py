"""The training engine on ranks: PyTorch's FSDP2, DTensor and pipelining, and replicas, of transformers models."""
