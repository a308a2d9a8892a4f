"""Rollout scheduling: ledger, strategies, driver and journal. Works without torch."""
