"""Running the decoder with real tensors. Needs the `run` extra."""
