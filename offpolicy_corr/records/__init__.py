"""Records: what samplers recorded of their tokens, from an engine's answer to a validated, saved record.

Nothing here knows a trainer: the loss reads records, records never read the loss.
"""
