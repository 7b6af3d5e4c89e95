"""Cache policies over traces: what they hit, and traces drawn so that they hit what is published."""
