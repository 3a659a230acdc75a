"""OpenAI's /v1/responses: conversations that the server keeps, also of answers in the background."""
