"""OpenAI's embeddings API."""
