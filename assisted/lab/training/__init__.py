"""Training what drafts: distilled models, early exits, Medusa and EAGLE heads. `assisted train METHOD`."""
