"""The advantage operators on the CPU: right values, torch.library's rules, and errors in words."""

import mmap

import pytest
import torch

from megatron_opo import kernel_build
from megatron_opo.advantages import kernel, kernel_cpu
from megatron_opo.advantages.kernel import (
    group_advantages_,
    group_advantages_padded_,
    group_index,
)
from megatron_opo.errors import KernelError
from tests import kernel_cases

RAGGED = torch.ops.megatron_opo.group_advantages_
PADDED = torch.ops.megatron_opo.group_advantages_padded_


@pytest.fixture(params=["cpp", "torch"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MEGATRON_OPO_KERNEL", request.param)
    return request.param


def ragged_arguments(dtype=torch.float32):
    return {
        "buffer": torch.full((9,), 5.0, dtype=dtype),
        "rewards": torch.tensor([1.0, 0.0, 1.0]),
        "weights": torch.tensor([2, 6, 1]),
        "group_offsets": torch.tensor([0, 2, 3]),
        "cu_seqlens": torch.tensor([0, 2, 8, 9]),
    }


def padded_arguments():
    rewards = torch.zeros(3, 6)
    rewards[0, 1] = 1
    mask = torch.arange(6) < torch.tensor([[2], [6], [3]])
    return {"token_rewards": rewards, "response_mask": mask, "groups": ["a", "a", "b"]}


def test_right_in_exact_fractions(implementation):
    kernel_cases.check(150)


def test_the_example_of_the_formula(implementation):
    arguments = ragged_arguments()
    group_advantages_(**arguments)
    assert arguments["buffer"].tolist() == [0.75] * 2 + [-0.25] * 6 + [0]
    arguments = padded_arguments()
    group_advantages_padded_(**arguments)
    assert arguments["token_rewards"].tolist() == [[0.75] * 2 + [0] * 4, [-0.25] * 6, [0] * 6]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -1e30, 12345.678])
def test_equal_rewards_give_exactly_zero(implementation, reward):
    weights = torch.tensor([3, 7, 0.1, 4097, 8191], dtype=torch.float64)
    buffer = torch.full((10,), 5.0)
    rewards = torch.full((5,), reward, dtype=torch.float64)
    group_advantages_(buffer, rewards, weights, torch.tensor([0, 5]), torch.arange(0, 11, 2))
    assert buffer.tolist() == [0.0] * 10
    tokens = torch.zeros(4, 8)
    tokens[:, 2] = reward
    group_advantages_padded_(tokens, torch.arange(8) < torch.tensor([[3], [4], [8], [5]]), "aaaa")
    assert (tokens == 0).all()


def test_groups_of_thousands_and_long_sequences(implementation):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([4096, 1, 0, 700])
    lengths = torch.randint(0, 60, (int(sizes.sum()),), generator=generator)
    lengths[[5, 4096]] = 131_072
    rewards = torch.randint(-3, 4, lengths.shape, generator=generator)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    buffer = torch.empty(int(cu_seqlens[-1]))
    group_advantages_(buffer, rewards, lengths, offsets, cu_seqlens)
    exact = kernel_cases.exact_advantages(
        rewards.tolist(), lengths.tolist(), [range(4096), [4096], range(4097, 4797)], False
    )
    firsts = buffer[cu_seqlens[:-1][lengths > 0]]
    kernel_cases.assert_close(firsts, [a for a, n in zip(exact, lengths, strict=True) if n > 0])
    assert torch.equal(buffer, firsts.repeat_interleave(lengths[lengths > 0]))


def test_any_number_of_threads_gives_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2, (40, 40_000), generator=generator).float()
    mask = torch.rand(tokens.shape, generator=generator) < 0.5
    many, few = [i % 20 for i in range(40)], [i % 3 for i in range(40)]
    cu_seqlens = torch.arange(0, 40 * 40_000 + 1, 40_000)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            flat = torch.empty(tokens.numel())
            offsets = torch.tensor([0, 7, 40])
            group_advantages_(flat, tokens.sum(1), mask.sum(1), offsets, cu_seqlens)
            assert kernel_cpu._threads(flat) == threads
            padded = [tokens.clone(), tokens.clone()]
            group_advantages_padded_(padded[0], mask, many)
            group_advantages_padded_(padded[1], mask, few)
            results.append([flat, *padded])
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


def test_offsets_beyond_two_to_the_31(implementation):
    if implementation == "torch":
        size, start = 9000, 2000  # it has no arithmetic of its own to overflow
    else:
        size, start = 2**31 + 7000, 2**31 - 2000
    # Memory that is never touched is never there: of 4 GiB, this takes a few pages.
    with mmap.mmap(-1, 2 * size) as memory:
        buffer = torch.frombuffer(memory, dtype=torch.bfloat16)
        group_advantages_(
            buffer,
            torch.tensor([1, 0, 3]),
            torch.tensor([1, 3, 1]),
            torch.tensor([0, 2, 3]),
            start + torch.tensor([0, 1000, 5000, 5001]),
            singleton_raw=True,
        )
        assert (buffer[start : start + 1000] == 0.75).all()
        assert (buffer[start + 1000 : start + 5000] == -0.25).all()
        assert buffer[start + 5000 :].tolist()[:3] == [3, 0, 0]
        assert buffer[start - 1000 : start].count_nonzero() == 0
        del buffer


def test_group_index_tells_strings_and_any_integers_apart():
    index = group_index(["7", "007", "7"])
    assert [part.tolist() for part in index] == [[0, 2, 1], [0, 0, 2], [2, 2, 3]]
    ids = torch.tensor([10**12, -1, 10**12])
    assert [part.tolist() for part in group_index(ids)] == [[1, 0, 2], [0, 1, 1], [1, 3, 3]]
    assert group_index(ids.numpy()).order.tolist() == [0, 2, 1]


def test_operators_keep_the_rules_of_torch_library(implementation):
    arguments = ragged_arguments()
    values = [arguments["rewards"].double(), arguments["weights"].double()]
    offsets = [arguments["group_offsets"], arguments["cu_seqlens"]]
    mask = torch.ones(9, dtype=torch.uint8)
    for optional in (None, mask):
        torch.library.opcheck(
            RAGGED.default, (arguments["buffer"], *values, *offsets, optional, False)
        )
    padded = padded_arguments()
    workspace = torch.zeros(3, 3, dtype=torch.float64)
    torch.library.opcheck(
        PADDED.default,
        (
            padded["token_rewards"],
            padded["response_mask"].view(torch.uint8),
            -1,
            *group_index(padded["groups"]),
            workspace,
            False,
        ),
    )


def test_compiles_into_one_graph(implementation):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(buffer, rewards, weights, group_offsets, cu_seqlens, tokens, mask, groups):
        group_advantages_(buffer, rewards * 2, weights, group_offsets, cu_seqlens)
        group_advantages_padded_(tokens, mask, groups)
        return buffer + 1, tokens + 1

    ragged, padded = ragged_arguments(), padded_arguments()
    groups = group_index(padded["groups"])
    flat, rows = step(*ragged.values(), padded["token_rewards"], padded["response_mask"], groups)
    assert flat.tolist() == [2.5] * 2 + [0.5] * 6 + [1]
    assert ragged["buffer"].tolist() == [1.5] * 2 + [-0.5] * 6 + [0]
    assert rows[0].tolist() == [1.75, 1.75, 1, 1, 1, 1]
    assert padded["token_rewards"][1].tolist() == [-0.25] * 6


RAGGED_FAULTS = [
    ({"buffer": torch.zeros(9, dtype=torch.float64)}, "buffer is torch.float64"),
    ({"buffer": torch.zeros(3, 3)}, "buffer has shape"),
    ({"buffer": torch.zeros(18)[::2]}, "buffer has strides"),
    ({"buffer": torch.zeros(9, requires_grad=True)}, "requires a gradient"),
    ({"rewards": torch.zeros(1, 3)}, "rewards is"),
    ({"rewards": torch.zeros(3, dtype=torch.complex64)}, "rewards is"),
    ({"weights": torch.zeros(2)}, r"weights is .* must be real numbers of shape \[3\]"),
    ({"weights": torch.tensor([1.0, -1.0, 1.0])}, "negative"),
    ({"weights": torch.tensor([1.0, torch.nan, 1.0])}, "NaN"),
    ({"weights": torch.zeros(3, device="meta")}, "weights is on meta"),
    ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens has 2 entries for 3 rewards"),
    ({"cu_seqlens": torch.tensor([0, 2, 8, 10])}, "outside of 0 to 9"),
    ({"cu_seqlens": torch.tensor([-1, 2, 8, 9])}, "outside of 0 to 9"),
    ({"cu_seqlens": torch.tensor([0, 8, 2, 9])}, "goes down"),
    ({"cu_seqlens": torch.tensor([0, 2, 8, 9], dtype=torch.int32)}, "int32"),
    ({"group_offsets": torch.tensor([0, 2])}, "number of rewards is 3"),
    ({"group_offsets": torch.tensor([0, 4, 2, 3])}, "goes down"),
    ({"group_offsets": torch.zeros(0, dtype=torch.int64)}, "one entry more"),
    ({"mask": torch.ones(8, dtype=torch.bool)}, "they must agree"),
    ({"mask": torch.ones(9)}, "mask is torch.float32"),
]
PADDED_FAULTS = [
    ({"token_rewards": torch.zeros(6)}, "2 dimensions"),
    ({"token_rewards": torch.zeros(6, 3).T}, "strides"),
    ({"token_rewards": torch.zeros(1, 6).expand(3, 6)}, "strides"),
    ({"token_rewards": torch.zeros(3, 2**28, device="meta")}, "rows of 268435456 tokens"),
    ({"response_mask": torch.ones(6, 3)}, "they must agree"),
    ({"response_mask": torch.ones(6, 3).T}, "contiguous"),
    ({"groups": ["a", "b"]}, r"groups.order is .* shape \[3\]"),
    ({"groups": torch.zeros(3)}, "must be integers"),
    ({"groups": [[1], [2], [3]]}, "cannot be a key"),
    ({"groups": list(torch.arange(3))}, "one tensor of integers"),
    ({"groups": kernel.GroupIndex(*torch.full((3, 3), 9))}, "leaves the 3 rows"),
    ({"workspace": torch.zeros(3, 3)}, "workspace is torch.float32"),
]


@pytest.mark.parametrize(("change", "message"), RAGGED_FAULTS)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = ragged_arguments() | change
    before = arguments["buffer"].clone()
    with pytest.raises(KernelError, match=message):
        group_advantages_(**arguments)
    assert torch.equal(arguments["buffer"], before)


@pytest.mark.parametrize(("change", "message"), PADDED_FAULTS)
def test_padded_arguments_that_do_not_fit_are_refused(change, message):
    with pytest.raises(KernelError, match=message):
        group_advantages_padded_(**padded_arguments() | change)


def test_a_kernel_that_is_unknown_or_cannot_run_here_is_refused_by_name(monkeypatch):
    for name, message in [
        ("numba", "use one of triton, cuda, cpp, torch"),
        ("triton", "runs on GPUs, not on cpu"),
        ("cuda", "runs on NVIDIA GPUs, not on cpu"),
    ]:
        monkeypatch.setenv("MEGATRON_OPO_KERNEL", name)
        with pytest.raises(KernelError, match=f"'{name}'.*{message}"):
            group_advantages_(**ragged_arguments())


def test_without_a_compiler_that_works_torch_takes_over_and_says_so(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "false")
    monkeypatch.delenv("MEGATRON_OPO_KERNEL", raising=False)
    kernel_cpu.library.cache_clear()
    kernel._implementation.cache_clear()
    try:
        arguments = ragged_arguments()
        group_advantages_(**arguments)
        assert arguments["buffer"][0] == 0.75
        assert "cpp kernel for advantages is not used: `false --version` failed" in caplog.text
        monkeypatch.setenv("MEGATRON_OPO_KERNEL", "cpp")
        with pytest.raises(KernelError, match=r"cannot be used\. cpp: `false --version` failed"):
            group_advantages_(**arguments)
    finally:
        kernel_cpu.library.cache_clear()
        kernel._implementation.cache_clear()


def test_a_library_is_built_once_for_each_source_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_build, "cache_directory", lambda: tmp_path)
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    command = ["g++", "-shared", "-fPIC"]
    first = kernel_build.build(source, command)
    built = first.stat().st_mtime_ns
    assert kernel_build.build(source, command) == first
    assert first.stat().st_mtime_ns == built
    assert kernel_build.build(source, [*command, "-O2"]) != first
    source.write_text('extern "C" int answer() { return 43 }')
    with pytest.raises(KernelError, match=r"(?s)failed with status 1:.*expected"):
        kernel_build.build(source, command)
    assert {path.suffix for path in tmp_path.iterdir()} == {".cpp", ".so"}


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path, monkeypatch):
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    kernel_build.cache_directory.cache_clear()
    try:
        assert kernel_build.cache_directory().is_dir()
    finally:
        kernel_build.cache_directory.cache_clear()
