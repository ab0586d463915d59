"""KV blocks that were evicted from the device, kept in host memory."""
