"""One recipe is one run; a session is its ranks."""

from hpctrain.run.recipe import Recipe
from hpctrain.run.recipe_file import load_recipe, parse_recipe
from hpctrain.run.session import Session, start

__all__ = ["Recipe", "Session", "load_recipe", "parse_recipe", "start"]
