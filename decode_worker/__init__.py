"""The COMPLETION process: decode only, KV received under a grant."""
