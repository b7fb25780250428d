"""One model process, whatever its role: model, KV cache, schedulers, sampler."""
