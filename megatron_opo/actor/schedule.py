"""Which sequence goes to which data-parallel rank and micro-batch: a pure function of lengths."""

import heapq


def plan_micro_batches(
    lengths: list[int], data_parallel: int, max_tokens: int, multiple_of: int = 1
) -> list[list[list[int]]]:
    """plan[rank][micro_batch] -> indices into `lengths`.

    Invariants: every sequence stands in exactly one micro-batch; all ranks have the same number of
    micro-batches, which the pipeline schedule needs, and it is a multiple of `multiple_of`, which
    the interleaved schedule needs; a micro-batch holds at most `max_tokens`
    tokens, with one exception: a longer sequence has a micro-batch of its own. A micro-batch is
    empty only on a rank with fewer sequences than micro-batches. Ranks are balanced by cost, a
    sequence counting its tokens plus the quadratic part of attention.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    loads = [(0.0, rank) for rank in range(data_parallel)]
    per_rank: list[list[int]] = [[] for _ in range(data_parallel)]
    for i in longest_first:
        load, rank = heapq.heappop(loads)
        per_rank[rank].append(i)
        heapq.heappush(loads, (load + _cost(lengths[i]), rank))
    plan = [_fill(sequences, lengths, max_tokens) for sequences in per_rank]
    count = max(1, *(len(bins) for bins in plan))
    count = -(-count // multiple_of) * multiple_of
    return [_split_to(bins, lengths, count) for bins in plan]


def _cost(length: int) -> float:
    # Attention overtakes the linear layers at about 24 hidden sizes of context; 32k suits 1B-70B.
    return length * (1 + length / 32_768)


def _fill(longest_first: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing into as few bins as it finds."""
    bins: list[list[int]] = []
    space: list[int] = []
    for i in longest_first:
        for b, free in enumerate(space):
            if lengths[i] <= free:
                bins[b].append(i)
                space[b] -= lengths[i]
                break
        else:
            bins.append([i])
            space.append(max_tokens - lengths[i])
    return bins


def _split_to(bins: list[list[int]], lengths: list[int], count: int) -> list[list[int]]:
    bins = [list(b) for b in bins]
    while len(bins) < count:
        largest = max(bins, key=lambda b: sum(lengths[i] for i in b) * (len(b) > 1), default=[])
        if len(largest) < 2:
            bins.append([])
            continue
        bins.remove(largest)
        bins += [largest[0::2], largest[1::2]]
    return bins
