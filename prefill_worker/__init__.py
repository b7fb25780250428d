"""The PROMPT process: prefill only, KV streamed out layer by layer."""
