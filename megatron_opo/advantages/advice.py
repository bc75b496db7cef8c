"""Recipes that run, but whose parts contradict each other."""

from megatron_opo.recipe import Recipe

LENGTH_WEIGHTED = ("opo", "opo_leave_one_out", "opo_batch", "opo_whitened", "opo_energy", "otb")
BATCH_WIDE = ("opo_batch", "opo_whitened", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def contradictions(recipe: Recipe) -> list[str]:
    """A warning for each; see docs/estimators.md."""
    estimator = recipe.algorithm.estimator
    aggregation = recipe.algorithm.loss_aggregation
    found = []
    if aggregation == "seq-mean-token-mean" and estimator in LENGTH_WEIGHTED:
        found.append(
            f"algorithm.estimator {estimator} weights responses by how much their summed gradient "
            "varies, which grows with the length; algorithm.loss_aggregation seq-mean-token-mean "
            "divides each by its length, so that the weights of least variance are 1 / length. "
            "The update stays right but varies more than need be: use seq-mean-token-sum, "
            "seq-mean-token-sum-norm or token-mean, or another estimator"
        )
    if aggregation == "seq-mean-token-mean" and estimator == "dr_grpo":
        found.append(
            "algorithm.estimator dr_grpo is there to remove a bias by length, which "
            "algorithm.loss_aggregation seq-mean-token-mean brings back: use "
            "seq-mean-token-sum-norm"
        )
    if recipe.rollout.dynamic_sampling.enabled and estimator in BATCH_WIDE:
        found.append(
            f"algorithm.estimator {estimator} scales or compares over the whole batch, so the "
            "groups that rollout.dynamic_sampling replaces change the advantages of the others"
        )
    if recipe.rollout.dynamic_sampling.enabled and estimator == "remax":
        found.append(
            "algorithm.estimator remax learns from groups of equal rewards too, where these "
            "differ from the greedy response's; rollout.dynamic_sampling replaces them"
        )
    return found
