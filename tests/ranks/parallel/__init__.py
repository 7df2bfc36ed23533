"""Models that are split over the ranks."""
