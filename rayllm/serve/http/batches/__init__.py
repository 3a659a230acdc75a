"""OpenAI's /v1/files and /v1/batches, in a folder that API servers share."""
