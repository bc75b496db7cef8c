"""Every sample has a seed of its own, today's and next year's the same."""

from megatron_opo.rollout.seeds import sample_seed


def test_no_two_samples_share_a_seed():
    keys = [
        (run, purpose, version, f"e{epoch}-{row}", index)
        for run in (0, 1)
        for purpose in ("train", "eval")
        for version in range(10)
        for epoch in range(5)
        for row in range(100)
        for index in range(10)
    ]
    seeds = {sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys) == 200_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Spread over the whole range: its halves and quarters are met equally often.
    for bit in (0, 1, 31, 32, 61, 62):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 100_000) < 1_500


def test_fields_do_not_run_into_each_other():
    assert sample_seed(0, "train", 1, "1", 11) != sample_seed(0, "train", 11, "1", 1)
    assert sample_seed(0, "train", 1, '1", 1', 1) != sample_seed(0, "train", 1, "1", 1)


def test_a_seed_stays_what_it_is():
    """A resumed run must draw what the run before it would have drawn. This number comes from
    printf '[0, "train", 3, "e0-17", 2]' | b2sum -l 64, without its last bit."""
    assert sample_seed(0, "train", 3, "e0-17", 2) == 600084106162148680
