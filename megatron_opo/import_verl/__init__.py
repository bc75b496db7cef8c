"""verl's command lines and configs -> recipes: `shell` and `values` read, `rules` say what each key
becomes, `convert` makes the recipe, `command` is the sub-command."""
