"""Drafts, acceptance, the text and the report of a call. Knows neither models nor C."""
