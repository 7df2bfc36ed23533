"""Batch jobs of Slurm: the script of a recipe, its submission, its status, and resizing to other numbers of nodes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
