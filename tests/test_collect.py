"""A step's rollout from real servers and real reward workers: what is drawn, kept and trained."""

import io
import time
from contextlib import ExitStack

import pytest
import torch
from servers import prompts

from megatron_opo.batch import Group, Prompt, Sample, pack
from megatron_opo.collect import collect, log_step, values_of_responses, write_advantages
from megatron_opo.desk import Desk, reward_log, warnings_of
from megatron_opo.errors import TrainingError
from megatron_opo.observe.logs import Logs, show_logs
from megatron_opo.observe.run_log import RunLog
from megatron_opo.prompts import PromptCursor, PromptSet
from megatron_opo.recipe import Recipe
from megatron_opo.rewards import RewardPool
from megatron_opo.runs import ATTEMPT_VARIABLE
from megatron_opo.stop import StopRequest

REWARD = """
def early_letters(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter < "P" for letter in solution_str[:2]) / 2

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5

def picky(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str[0] < "P":
        raise ValueError(f"cannot judge {len(solution_str)} characters")
    return 0.5

def leaves_a_trace(data_source, solution_str, ground_truth, extra_info=None):
    from pathlib import Path
    Path(__file__).with_name("trace").touch()
    return 0.5
"""
G, WANTED, LIMIT = 4, 6, 5


def early_letters(text):
    return sum(letter < "P" for letter in text[:2]) / 2


@pytest.fixture
def open_desk(qwen_pool, tmp_path):
    """`open_desk(function, algorithm, dynamic)`; the pool holds its own weights as a new version,
    and so the desk comes with that."""
    reward_file = tmp_path / "reward.py"
    reward_file.write_text(REWARD)
    rollout = qwen_pool.rollout()
    version = qwen_pool.next_version()
    rollout.sync(iter(qwen_pool.weights().items()), version)
    with ExitStack() as resources:

        def make(function="early_letters", algorithm=None, dynamic=None, **more):
            recipe = Recipe.model_validate(
                {
                    "name": "collect",
                    "run_dir": str(tmp_path / "run"),
                    "model": {"path": qwen_pool.model.path},
                    "data": {"train": {"files": ["unused.jsonl"]}},
                    "reward": {"function": f"{reward_file}:{function}", "workers": 1},
                    "rollout": {
                        "prompts_per_step": WANTED,
                        "samples_per_prompt": G,
                        "max_response_tokens": LIMIT,
                        # A quarter of the vocabulary, so that some responses end and some are cut.
                        "stop_token_ids": list(range(4, 30)),
                        "dynamic_sampling": dynamic or {},
                        **more,
                    },
                    "algorithm": algorithm or {},
                }
            )
            known = PromptSet("train", tuple(prompts(40)), 40, 0, 0, 32)
            log = RunLog(
                recipe.run_path, recipe_text="name: r\n", versions={}, total_steps=1, quiet=True
            )
            resources.enter_context(log)
            rewards = resources.enter_context(
                RewardPool(recipe.reward, reward_log(recipe.run_path))
            )
            cursor = PromptCursor(known, shuffle=True, seed=3)
            stop = StopRequest()
            desk = Desk(recipe, log, cursor, known, None, rewards, rollout, stop, ExitStack())
            return desk, version

        yield make


def greedy_gap(model, prompt: Prompt, response) -> float:
    """How far the response's tokens are from the most likely ones, in logits."""
    ids = torch.tensor([[*prompt.token_ids, *response]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1]
    chosen = logits.gather(1, torch.tensor([list(response)]).T)[:, 0]
    return (logits.max(-1).values - chosen).max().item()


def test_remax_with_dynamic_sampling(open_desk, qwen_pool):
    desk, version = open_desk(
        algorithm={"estimator": "remax"}, dynamic={"enabled": True, "max_rounds": 50}
    )
    batch = collect(desk, version)
    drawn = desk.drawn
    assert len(drawn.groups) == WANTED
    for group in drawn.groups:
        assert len({s.reward for s in group.samples}) > 1
    for group in drawn.dropped:
        assert len({s.reward for s in group.samples}) == 1
    # Dropped prompts count as dealt in this epoch, and come again in the next.
    assert desk.cursor.state()["position"] == WANTED + len(drawn.dropped)

    model = qwen_pool.reference(qwen_pool.weights())
    for group in (*drawn.groups, *drawn.dropped):
        assert group.greedy.reward == early_letters(group.greedy.text)
        assert greedy_gap(model, group.prompt, group.greedy.response_ids) < 1e-4
        assert [s.reward for s in group.samples] == [early_letters(s.text) for s in group.samples]
    assert batch.num_sequences == WANTED * G, "the greedy responses are not trained"

    write_advantages(desk, batch, None)
    baselines = torch.tensor([g.greedy.reward for g in drawn.groups]).repeat_interleave(G)
    assert torch.equal(batch.mean_advantages, batch.rewards - baselines)

    log_step(desk, batch, {}, version)
    metrics = desk.rollout_metrics()
    assert metrics["rollout/groups_dropped"] == len(drawn.dropped)
    assert metrics["rollout/rounds"] == drawn.rounds
    # Every round samples twice: the groups, and the greedy responses.
    assert len(desk.samplings) == 2 * drawn.rounds
    assert sum(s.samples for s in desk.samplings) == (WANTED + len(drawn.dropped)) * (G + 1)


def test_what_a_run_is_seldom_meant_to_do_is_said(open_desk):
    recipe = open_desk()[0].recipe
    (few,) = warnings_of(recipe, "cuda", WANTED - 1)
    assert few.startswith(f"data.train has {WANTED - 1} prompts, rollout.prompts_per_step is")
    (slow,) = warnings_of(recipe, "cpu", WANTED)
    assert recipe.model.dtype == "bfloat16" and "model.dtype float32 is faster" in slow
    assert warnings_of(recipe, "cuda", WANTED) == []


@pytest.mark.parametrize("attempt", [None, "7.1"])
def test_what_reward_functions_print_is_among_the_logs(tmp_path, monkeypatch, attempt):
    if attempt:
        monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
    path = reward_log(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text("judged\n")
    out = io.StringIO()
    show_logs(Logs(tmp_path), follow=False, out=out)
    assert "rewards | judged" in out.getvalue()


def test_why_samples_have_no_reward_is_said_once(open_desk):
    desk, version = open_desk("picky")
    collect(desk, version)
    without = [s for group in desk.drawn.groups for s in group.samples if s.reward is None]
    assert 0 < len(without) < WANTED * G
    collect(desk, version)
    log = (desk.recipe.run_path / "run.log").read_text()
    warning = f"warning: {len(without)} of {WANTED * G} samples have no reward and are left out of"
    assert log.count("have no reward") == log.count(warning) == 1
    assert log.count("ValueError: cannot judge") == 1


def test_without_dynamic_sampling_every_group_is_kept(open_desk):
    desk, version = open_desk("constant")
    batch = collect(desk, version)
    assert batch.num_sequences == WANTED * G
    assert desk.cursor.state()["position"] == WANTED
    assert "rollout/rounds" not in desk.rollout_metrics()
    write_advantages(desk, batch, None)
    assert not batch.advantages.any()


def test_groups_are_scored_while_others_are_sampled(open_desk, tmp_path):
    desk, version = open_desk("leaves_a_trace")
    generate, arrived = desk.rollout.generate, []

    def slowly(*args, on_group, **settings):
        def wait_for_the_first(group):
            on_group(group)
            arrived.append(group)
            deadline = time.monotonic() + 60
            while not (tmp_path / "trace").exists():
                assert time.monotonic() < deadline, "nothing is scored meanwhile"
                time.sleep(0.02)

        return generate(*args, on_group=wait_for_the_first, **settings)

    desk.rollout.generate = slowly
    batch = collect(desk, version)
    assert len(arrived) == WANTED and batch.rewards.tolist() == [0.5] * (WANTED * G)


def test_extra_prompts_are_given_up_at_most_twice_and_none_is_lost(open_desk):
    extra = 2
    desk, version = open_desk(extra_prompts=extra)
    trained = []
    for _ in range(5):
        start = desk.cursor.state()
        collect(desk, version)
        trained += [group.prompt.id for group in desk.drawn.groups]
        assert len(desk.drawn.groups) == WANTED
        assert [len(g.samples) for g in desk.drawn.groups] == [G] * WANTED
        state = desk.cursor.state()
        assert len(state["back"]) == extra == desk.rollout_metrics()["rollout/groups_given_up"]
        assert {times for _, times in state["back"]} <= {1, 2}
        assert not {name for name, _ in state["back"]} & set(trained)
        # What is dealt in order is trained, or comes again.
        assert state["position"] == len(trained) + extra
        assert desk.drawn_from == start
    assert len(set(trained)) == len(trained)
    desk.return_prompts()
    assert desk.cursor.state() == start


def test_rewards_that_never_differ_stop_the_run_with_the_reason(open_desk):
    desk, version = open_desk("constant", dynamic={"enabled": True, "max_rounds": 2})
    with pytest.raises(TrainingError, match=r"2 rounds of sampling.*rewards seen: 0\.5"):
        collect(desk, version)


def test_masked_responses_are_not_trained(open_desk):
    desk, version = open_desk(algorithm={"truncated": "mask"})
    batch = collect(desk, version)
    finished = [s.finish_reason == "stop" for g in desk.drawn.groups for s in g.samples]
    assert batch.sample_ids.tolist() == [i for i, stop in enumerate(finished) if stop]


def test_each_response_finds_its_tokens_in_the_batch_of_the_update():
    def sample(group, index, ids, **fields):
        size = len(ids)
        return Sample(group, index, ids, (-1.0,) * size, (0,) * size, "stop", "", **fields)

    first = (sample("a", 0, (5, 6), reward=1.0), sample("a", 1, (7,), reward_error="no number"))
    others = (False, True, False, True)  # of several turns
    second = (sample("b", 0, (1, 2, 3, 4), reward=0.0, loss_mask=others),)
    groups = [
        Group(Prompt("a", (9, 9), "", "", ""), first),
        Group(Prompt("b", (9,), "", "", ""), second),
    ]
    batch = pack(groups)
    values = values_of_responses(batch, groups, {"token_gaps": batch.tokens.double()})
    assert values(first[0]) == {"token_gaps": [5, 6]}
    assert values(second[0]) == {"token_gaps": [1, 2, 3, 4]}
    assert values(first[1]) == {}, "it could not be scored, and is in no update"
