"""A checkpoint on the evaluation data of a recipe, and two of them side by side."""
