"""Rewards: verifiers (`verifiers`), run in worker processes (`worker`) by a pool (`pool`).

Importing this package imports neither torch nor a verifier's libraries: workers start light.
"""
