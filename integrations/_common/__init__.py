"""Adapter: what the adapters of trainers share: row layouts, ragged slices of candidates, reducers, collectives, errors."""
