"""One recipe is one run; a session is its ranks."""

from hpctrain.run.recipe.load import load_recipe, parse_recipe
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session, start

__all__ = ["Recipe", "Session", "load_recipe", "parse_recipe", "start"]
