"""Adapter: what trainers' adapters share: row layouts, ragged candidate rows, reducers, collectives, errors."""
