"""Moving KV blocks between two caches. Knows neither engines nor workers."""
