"""What a function of the user's may do wrong in a response of several turns. (What a response is
made of is tested with real servers, in test_rollout_client.py.)"""

import asyncio
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from models import character_tokenizer

from megatron_opo.batch import Group, Prompt, Sample, pack
from megatron_opo.errors import RecipeError, ServerError
from megatron_opo.recipe import RolloutConfig
from megatron_opo.rollout.episode import Episode, Play, load_play

PROMPT = Prompt("p", (5, 6), "ab", "test", None)
TOKENIZER = character_tokenizer()
HI = tuple(TOKENIZER.encode("hi"))


async def say_hi(ids, most, stop):
    """In place of a server."""
    said = HI[:most]
    text = TOKENIZER.decode(said)
    end = "length" if len(said) == most else "stop"
    return Sample("p", 0, said, (-0.5,) * len(said), (3,) * len(said), end, text, server="s")


def play(function, ask=say_hi, timeout_s=30.0, room=10):
    episode = Episode(PROMPT, 1, ask, TOKENIZER, room)
    return asyncio.run(Play(function, __file__, timeout_s, TOKENIZER)(episode))


def test_a_response_is_cut_where_there_is_no_room_for_more():
    async def forever(episode):
        while True:
            await episode.generate()
            episode.add("....")

    sample = play(forever)
    assert sample.text == "hi....hi" and sample.finish_reason == "length"
    assert sample.loss_mask == (True,) * 2 + (False,) * 4 + (True,) * 2
    assert sample.versions == (3,) * 8 and sample.logprobs == (-0.5,) * 2 + (0.0,) * 4 + (-0.5,) * 2
    assert sample.added == ((2, 6),)
    assert (sample.index, sample.length, sample.turns, sample.reward_error) == (1, 4, 2, None)

    async def to_the_brim(episode):
        await episode.generate()

    assert play(to_the_brim, room=2).finish_reason == "length"
    assert play(to_the_brim, room=3).finish_reason == "stop"


def test_what_is_added_in_pieces_is_one_range_and_nothing_is_none():
    async def in_pieces(episode):
        episode.add("..")
        await episode.generate()
        episode.add("")
        for piece in ("..", "...", ""):
            episode.add(piece)
        await episode.generate()

    sample = play(in_pieces, room=20)
    assert (sample.text, sample.added) == ("..hi.....hi", ((0, 2), (4, 9)))
    assert play(say_once).added == ()


async def say_once(episode):
    await episode.generate()


async def raises(episode):
    await episode.generate()
    raise ValueError("no such tool")


async def hangs(episode):
    await episode.generate()
    await asyncio.sleep(100)


async def times_out_itself(episode):
    async with asyncio.timeout(0.01):
        await asyncio.sleep(100)


async def never_stops(episode):
    while True:
        with suppress(Exception):
            await episode.generate()


async def says_nothing(episode):
    episode.add("only the environment")


async def asks_twice(episode):
    await asyncio.gather(episode.generate(), episode.generate())


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (raises, r"rollout\.function: ValueError: no such tool \(line \d+ of test_episode\.py\)"),
        (hangs, r"rollout\.function took over 0\.2 s"),
        (times_out_itself, r"rollout\.function: TimeoutError \(line \d+ of test_episode\.py\)"),
        (never_stops, r"rollout\.function took over 0\.2 s"),
        (says_nothing, r"ended before the policy had said anything"),
        (asks_twice, r"generate\(\) was called while the episode was still generating"),
    ],
)
def test_a_function_that_fails_leaves_a_sample_that_cannot_be_scored(function, problem):
    sample = play(function, timeout_s=0.2, room=100)
    assert sample.reward is None
    assert re.search(problem, str(sample.reward_error))


def test_a_server_that_fails_is_not_taken_for_a_mistake_of_the_function():
    async def refuse(ids, most, stop):
        raise ServerError("no server left")

    with pytest.raises(ServerError, match="no server left"):
        play(never_stops, refuse, timeout_s=0.2)


def test_what_is_added_carries_no_loss_in_a_batch():
    async def twice(episode):
        await episode.generate()
        episode.add("=")
        await episode.generate()

    async def once(episode):
        await episode.generate()

    samples = [replace(play(each), reward=1.0) for each in (twice, once)]
    batch = pack([Group(PROMPT, tuple(samples))])
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1]
    assert batch.tokens.tolist() == [5, 6, *HI, *TOKENIZER.encode("="), *HI, 5, 6, *HI]
    assert batch.cu_seqlens.tolist() == [0, 7, 11] and batch.response_lengths.tolist() == [4, 2]


FILES = {
    "good.py": "async def talk(episode): ...\nasync def two(a, b): ...\ndef plain(episode): ...\n",
    "broken.py": "import nothing_of_this_name\n",
}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent.py:talk", r"absent\.py is not a file"),
        ("good.py", r"must be path/to/file\.py:function"),
        ("good.py:tlak", r"did you mean `talk`"),
        ("good.py:plain", r"is not an async function"),
        ("good.py:two", r"is called with one argument, the episode"),
        ("broken.py:talk", r"broken\.py cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_had_is_named(tmp_path, name, problem):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(RecipeError, match=r"^rollout\.function: .*" + problem):
        load_play(RolloutConfig(function=str(tmp_path / name)), TOKENIZER)
    good = RolloutConfig(function=str(tmp_path / "good.py:talk"), function_timeout_s=1.0)
    assert load_play(good, TOKENIZER).timeout_s == 1.0
    assert load_play(RolloutConfig(), TOKENIZER) is None
