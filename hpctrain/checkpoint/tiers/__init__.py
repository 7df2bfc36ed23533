"""Two tiers: node storage and a partner's copy first, then drained to the shared directory; recovery."""
