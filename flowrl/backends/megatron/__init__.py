"""The Megatron engine: tensor, pipeline, context and expert parallel training with megatron-core."""
