"""Anthropic's API: POST /v1/messages and POST /v1/messages/count_tokens.

A body becomes the `ChatBody` of the same conversation, and goes the way of every chat from there. docs/messages.md says
what each field does here.
"""
