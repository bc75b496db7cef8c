"""Errors whose message is meant for the person who runs the job: what, got, allowed, what to do.

The command line prints them without a traceback; anything else is a bug and keeps its traceback.
"""


class OpoError(Exception):
    """Base of all of them. `exit_code` 2 says that starting the same again would fail the same."""

    exit_code = 2


class RecipeError(OpoError, ValueError):
    """A recipe that cannot run; the message lists every problem found."""


class VerlError(OpoError):
    """A command line or config of verl that cannot be read or become a recipe."""


class DataError(OpoError):
    """A dataset, or a row of it, that cannot be used."""


class RewardError(OpoError):
    """A reward function that cannot be loaded or that fails on everything."""


class KernelError(OpoError, ValueError):
    """Arguments that the advantage kernel cannot take, or a kernel that cannot be built."""


class ServerError(OpoError):
    """A rollout server that does not start, dies, or answers something unusable."""

    exit_code = 1


class OnPolicyError(OpoError):
    """Something that would make the update not exactly on-policy."""


class TrainingError(OpoError):
    """An update that must not be applied, such as one with a gradient that is not finite."""


class NonFiniteError(TrainingError):
    """Numbers of an update that are not finite. Raised by all ranks; nothing was applied on any."""


class WeightError(OpoError):
    """Weights that are missing, misshapen, non-finite, or differ from what they should be."""


class CheckpointError(OpoError):
    """A checkpoint that cannot be written or read."""


class UnfitEnvironmentError(OpoError):
    """An installed package or machine that this project cannot work with."""


class ClusterError(OpoError):
    """Nodes of a job that do not find each other, do not match, or are lost."""

    exit_code = 1


class LogError(OpoError):
    """A run directory that cannot be written or read."""
