"""KV offload for real: host memory, streams, pools."""
