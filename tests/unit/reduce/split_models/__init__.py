"""Updaters of models that are split over the ranks."""
