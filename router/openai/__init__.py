"""The OpenAI dialect: request bodies, error bodies, chat templates, incremental text."""
